"""Bundled models: packed from a run, listed, and used by name wherever a run or a tokenizer is expected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from block_recurrent import load_run, models
from block_recurrent.checkpoint import verify
from block_recurrent.cli.main import main
from block_recurrent.data import load_tokenizer
from block_recurrent.models.card import read_card
from block_recurrent.train.report import read_metrics
from tests.models.conftest import command


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command fails with."""
    capsys.readouterr()
    assert main([str(word) for word in words]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_packed_model_is_the_run_in_bfloat16(box: Path) -> None:
    run, packed = load_run(box / "run-code"), load_run("code")
    stored = load_file(box / "box" / "code" / "model.safetensors")
    for name, weight in run.model.state_dict().items():
        assert stored[name].dtype == (torch.bfloat16 if weight.ndim >= 2 else torch.float32)
        wanted = weight.to(torch.bfloat16).float() if weight.ndim >= 2 else weight
        assert torch.equal(packed.model.state_dict()[name], wanted)
    assert packed.tokenizer.sha256 == run.tokenizer.sha256
    assert packed.checkpoint.step == 12
    assert str(box) not in (box / "box" / "code" / "config.toml").read_text(), "where it was made is not told"


def test_it_is_listed_and_shown(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    command("models")
    printed = capsys.readouterr().out
    bits = json.loads((box / "books.json").read_text())["bits_per_byte"]
    assert all(word in printed for word in ("books", "code", "CC0-1.0", f"{bits:.3f}"))
    command("models", "--json")
    books, code = json.loads(capsys.readouterr().out)
    assert (books["name"], code["name"]) == ("books", "code")
    assert code["bytes"] == sum(path.stat().st_size for path in (box / "box" / "code").iterdir())
    command("models", "show", "code")
    text = capsys.readouterr().out
    for said in (
        "Made-up words",
        "It knows no language",
        "Without a memory",
        "optimizer.name=adafactor",
        "train/0.txt",
    ):
        assert said in text
    assert text.rstrip("\n") == (box / "box" / "code" / "README.md").read_text().rstrip("\n")
    assert "did you mean 'code'" in failure(capsys, "models", "show", "cde")


def test_the_card_holds_what_evaluations_say(box: Path) -> None:
    card = read_card(box / "box" / "code")
    with_memory, cleared = (json.loads((box / f"{name}.json").read_text()) for name in ("code", "code-cleared"))
    found = card["evaluation"]
    assert found["memory"]["bits_per_byte"] == with_memory["bits_per_byte"]
    assert found["cleared"]["clear_every"] == 64
    gap = cleared["bits_per_token"] - with_memory["bits_per_token"]
    assert found["state_saves"]["bits_per_token"] == pytest.approx(gap)
    low, high = found["state_saves"]["interval_95"]
    assert low <= found["state_saves"]["bits_per_token"] <= high
    assert found["twin_minus_model"]["bits_per_token"] == 0, "its own twin"
    trained = [line for line in read_metrics(box / "run-code") if line["split"] == "train"]
    assert card["training"]["tokens"] == sum(line["tokens"] for line in trained)
    assert card["training"]["curve"][-1]["step"] == 12
    assert card["model"]["parameters"] == sum(p.numel() for p in load_run("code").model.parameters())


def test_a_name_serves_wherever_a_run_does(box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, data = box / "texts" / "test" / "0.txt", box / "data-code"
    command("read", "code", text, "--memory", "book.memory")
    command("write", "code", "--memory", "book.memory", "--tokens", 5)
    command("score", "code", text)
    command("eval", "books", "--data", box / "data-books", "--document", "test/0.txt")
    command("headroom", "code", "--data", data, "--max-tokens", 500)
    command("compare", "code", "--clear-state", "--data", data, "--document", "test/0.txt", "--out", "report",
            "--no-png", "--no-inspect")  # fmt: skip
    command("inspect", "code", text, "--tokens", 300, "--no-ablation")
    command("export", "code", "--out", "weights.safetensors")
    command("data", "prepare", box / "texts", "--out", "mine", "--tokenizer", "books")
    manifest = json.loads(Path("mine/manifest.json").read_text())
    assert manifest["tokenizer"]["sha256"] == load_run("books").tokenizer.sha256


def test_tokenizers_by_name(box: Path) -> None:
    assert load_tokenizer("books").sha256 == load_tokenizer(box / "books.model").sha256
    assert load_tokenizer("code").model is None, "that of bytes"
    assert load_tokenizer(box / "run-books").sha256 == load_tokenizer("books").sha256, "a run's folder serves too"


def test_a_folder_of_that_name_is_meant_by_its_path(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(box / "run-books", "code")
    assert load_run("./code").tokenizer.model is not None, "the folder"
    assert load_run(Path("code")).tokenizer.model is not None, "a Path is a path"
    boxed = load_run("code")
    assert boxed.tokenizer.model is None, "the model in the box"
    assert "for the folder of that name, use './code'" in boxed.notes[0]


def test_damage_is_found(box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(box / "box" / "code", copy)
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert "the hash of" in failure(capsys, "write", copy)
    (copy / "card.json").write_text((copy / "card.json").read_text().replace("Made-up", "Royal"))
    assert "was changed after it was written" in failure(capsys, "models", "show", copy)


def test_what_pack_refuses(box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = ["models", "pack", box / "run-code", "--name", "code", "--out"]
    assert "the limit is 0.01" in failure(capsys, *pack, tmp_path / "small", "--most-mb", "0.01")
    assert not (tmp_path / "small").exists()
    (tmp_path / "mine").mkdir()
    assert "give --overwrite" in failure(capsys, *pack, tmp_path / "mine")
    assert "is not only a packed model" in failure(capsys, *pack, tmp_path / "mine", "--overwrite")
    assert "not a path" in failure(capsys, *pack[:3], "--name", "a/b", "--out", tmp_path / "x")
    (tmp_path / "bad.toml").write_text("sumary = 'x'")
    assert "its keys are summary" in failure(capsys, *pack, tmp_path / "x", "--about", tmp_path / "bad.toml")
    other = ["--memory", box / "code.json", "--twin", tmp_path / "one.json"]
    command("eval", box / "run-code", "--data", box / "data-code", "--document", "test/0.txt", "--json", "one.json")
    assert "on different documents" in failure(capsys, *pack, tmp_path / "x", *other)


def test_an_empty_box_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "ROOM", tmp_path)
    command("models")
    assert "no bundled models" in capsys.readouterr().out
    assert "none in this installation" in failure(capsys, "models", "show", "code")


@pytest.mark.parametrize("name", models.names())
def test_what_ships(name: str) -> None:
    """Each model of this checkout is whole, small, and says what it is."""
    folder = models.ROOM / name
    verify(folder)
    card = read_card(folder)
    assert card["name"] == name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12_000_000
    assert all(card[key] for key in ("summary", "licence", "limits", "samples"))
    assert card["data"]["trained_on"]
    assert {"memory", "cleared"} <= set(card["evaluation"])
    assert "twin" in card["evaluation"] or any("twin" in limit for limit in card["limits"])

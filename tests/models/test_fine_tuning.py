"""`brt train --init-from NAME`: the model comes along, the gain is shown; `--tune state`: only the state learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from block_recurrent import load_run
from block_recurrent.checkpoint import INITIAL_STATE, load_state
from block_recurrent.cli.main import main
from block_recurrent.errors import MemoryMismatchError
from tests.models.conftest import command
from tests.models.test_box import failure


def gains(printed: str) -> dict[str, tuple[float, float]]:
    found = re.findall(r"^(with its memory|state cleared at each segment) +([\d.]+) +([\d.]+) +[-+]", printed, re.M)
    return {way: (float(before), float(after)) for way, before, after in found}


def test_it_goes_on_from_a_model_in_the_box(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--init-from", "code", "--data", box / "data-code", "--out", "mine", "--steps", 30, "--lanes", 4]
    command(*words, "--lr", 0.01, "--eval-tokens", 2000)
    printed = capsys.readouterr().out
    found = gains(printed)
    assert set(found) == {"with its memory", "state cleared at each segment"}
    before, after = found["with its memory"]
    assert f"Fine-tuning saves {1 - after / before:.1%} of the bits" in printed
    assert all(after < before - 0.05 for before, after in found.values())
    mine, base = load_run("mine"), load_run("code")
    assert mine.config.model == base.config.model
    assert (mine.config.optimizer.name, mine.config.train.init_from) == ("adamw", "code")
    command(*words, "--lr", 0.01, "--eval-tokens", 2000)  # nothing more to do
    assert gains(capsys.readouterr().out) == found


def test_another_tokenizer_is_refused_with_the_command(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failure(capsys, "train", "--init-from", "books", "--data", box / "data-code", "--out", "mine")
    assert "was prepared with another tokenizer" in line
    assert "--tokenizer books'" in line
    line = failure(capsys, "train", "--init-from", "nowhere", "--data", box / "data-code", "--out", "mine")
    assert "--init-from nowhere: it has no checkpoint" in line


def test_only_the_state_is_tuned(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("train", "--init-from", "code", "--tune", "state", "--data", box / "data-code", "--out", "mine",
            "--steps", 20, "--lanes", 4, "--eval-tokens", 2000)  # fmt: skip
    before, after = gains(capsys.readouterr().out)["state cleared at each segment"]
    assert after < before
    base, tuned = load_run("code").model, load_run("mine").model
    changed = {name for name, p in tuned.state_dict().items() if not torch.equal(p, base.state_dict()[name])}
    assert changed == {f"layers.1.{INITIAL_STATE}"}
    state = Path("mine/tuned.state")
    assert state.stat().st_size < 8000, "16 vectors of 48 numbers"
    load_state(base, state)
    assert all(torch.equal(p, tuned.state_dict()[name]) for name, p in base.state_dict().items())

    text = box / "texts" / "test" / "0.txt"
    scores = []
    for words in (["mine"], ["code", "--state", state], ["code"]):
        command("score", words[0], text, *words[1:])
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1] != scores[2]
    command("read", "code", text, "--state", state, "--memory", "book.memory")
    command("write", "code", "--state", state, "--memory", "book.memory", "--tokens", 3)
    command("eval", "code", "--state", state, "--data", box / "data-code", "--document", "test/0.txt")


def test_a_state_fits_its_own_weights_only(box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("train", "--init-from", "code", "--tune", "state", "--data", box / "data-code", "--out", "mine",
            "--steps", 2, "--lanes", 4, "--eval-tokens", 200)  # fmt: skip
    state = tmp_path / "mine" / "tuned.state"
    with pytest.raises(MemoryMismatchError, match="only with the weights that it was tuned for"):
        load_state(load_run("books").model, state)
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    assert "don't match their hash" in failure(capsys, "write", "code", "--state", state)
    command("read", "code", box / "texts" / "test" / "0.txt", "--memory", "book.memory")
    assert "is not a file of initial states" in failure(capsys, "write", "code", "--state", "book.memory")


def test_a_model_without_a_state_has_none_to_tune(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--system",
        "slide",
        "--size",
        "micro",
        "--data",
        str(box / "data-code"),
        "--out",
        "mine",
        "--tune",
        "state",
    ]
    assert main(["train", *words]) == 2
    assert "this model has no recurrent state" in capsys.readouterr().err
    assert main(["train", *words[:-1], "gates"]) == 2
    assert "it must be one of all, state" in capsys.readouterr().err

"""Runs, checkpoints, memory files, prepared data and exports that version 0.1.0 wrote still load and mean the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from block_recurrent.cli.main import main

FILES = Path(__file__).parent / "v0_1_0"
SYSTEMS = ("rec-fixed-skip", "memorizing")
NOT_LEARNED = {"tokens_per_second", "data_wait"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy, because a run's folder is written to."""
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_memory_file_scores_a_text_as_before(files, system, capsys):
    memory, text = files / f"{system}.memory", files / "text.txt"
    assert main(["score", str(files / system), "--memory", str(memory), "--text", str(text), "--json"]) == 0
    expected = json.loads((files / f"{system}-score.json").read_text())
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_memory_file_is_continued_as_before(files, system, capsys):
    memory = files / f"{system}.memory"
    arguments = ["write", str(files / system), "--memory", str(memory), "--tokens", "40", "--temperature", "0"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == (files / f"{system}-written.txt").read_text()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_resumes_as_it_went_on_then(files, system, monkeypatch):
    monkeypatch.chdir(files)  # the run's data path is relative
    # Without dropout, as the numbers that 0.1.0 gave: which random numbers a kernel draws is no part of a run.
    config = files / system / "config.toml"
    config.write_text(config.read_text().replace("dropout = 0.05", "dropout = 0.0"))
    arguments = ["--system", system, "--size", "micro", "--data", "data", "--out", system, "--steps", "4"]
    settings = (
        *("model.d_model=16", "model.mlp_dim=32", "model.head_dim=8", "model.num_heads=2"),
        *("train.lanes=2", "train.save_every=2", "eval.every=2", "eval.tokens=256", "schedule.warmup=2"),
        *("model.dropout=0.0", "model.attention_dropout=0.0"),
    )
    arguments += [part for setting in settings for part in ("--set", setting)]
    assert main(["train", *arguments]) == 0
    found = [json.loads(line) for line in (files / system / "metrics.jsonl").read_text().splitlines()[-3:]]
    expected = [json.loads(line) for line in (files / f"{system}-continued.jsonl").read_text().splitlines()]
    for mine, theirs in zip(found, expected, strict=True):
        learned = {
            key: value for key, value in theirs.items() if isinstance(value, (int, float)) and key not in NOT_LEARNED
        }
        assert {key: mine[key] for key in learned} == pytest.approx(learned, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_export_loads(files, system):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(files / f"{system}-hf", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / f"{system}-hf", trust_remote_code=True)
    tokens = tokenizer("Anna met Boris", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()

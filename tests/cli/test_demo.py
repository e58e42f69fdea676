"""`brt demo`: prepares, trains two models, evaluates, compares, reads and writes; goes on where it stopped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from block_recurrent.cli import main as cli
from block_recurrent.cli.main import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    words = random.Random(0).choices(
        ["the", "cat", "sat", "on", "a", "mat", "and", "Alice", "saw", "Bob", "there"], k=500
    )
    for split, count in (("train", 8), ("validation", 2), ("test", 2)):
        (tmp_path / "texts" / split).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "texts" / split / f"{number}.txt").write_text(" ".join(words[number * 9 :]))
    return tmp_path / "texts"


def arguments(source: Path, out: Path) -> list[str]:
    return ["demo", "--source", str(source), "--out", str(out), "--size", "micro", "--steps", "4"]


def test_it_does_all_of_it_and_again_at_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(arguments(source, out)) == 0
    printed = capsys.readouterr().out
    for command in ("data prepare", "train", "eval", "compare", "read", "write"):
        assert f"$ brt {command}" in printed
    assert "Try next:" in printed
    assert str(out / "report.html") in printed
    assert f"brt serve {out / 'rec-fixed-skip'}" in printed
    sizes = [path.stat().st_size for path in (source / "test").iterdir()]
    assert json.loads((out / "slide-plus" / "test.json").read_text())["bytes"] == sum(sizes)
    metrics = (out / "rec-fixed-skip" / "metrics.jsonl").read_text()
    assert main(arguments(source, out)) == 0
    assert (out / "rec-fixed-skip" / "metrics.jsonl").read_text() == metrics
    assert "$ brt data prepare" not in capsys.readouterr().out


def test_the_commands_it_shows_can_be_typed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []
    true_dispatch = cli.dispatch

    def noted(argv: list[str]) -> int:
        shown.append(list(argv))
        return true_dispatch(argv)

    monkeypatch.setattr(cli, "dispatch", noted)
    assert main(arguments(source, tmp_path / "demo")) == 0
    for command in shown[1:]:
        if command[0] in ("eval", "read"):
            done = subprocess.run([sys.executable, "-m", "block_recurrent", *command], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_bad_input_is_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0", "--out", str(tmp_path / "demo")]) == 2
    assert capsys.readouterr().err == "brt: error: --steps is 0: it must be at least 1\n"


@pytest.mark.slow
def test_as_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "block_recurrent", "demo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    scores = json.loads((tmp_path / "runs" / "demo" / "rec-fixed-skip" / "test.json").read_text())
    assert scores["bits_per_byte"] < 3

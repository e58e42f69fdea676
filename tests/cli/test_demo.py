"""`brt demo`: reads with a bundled model, trains, stops and resumes; resumes when rerun; harms no files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from block_recurrent import models
from block_recurrent.cli.main import main
from tests.models.conftest import box, workshop  # noqa: F401

QUICK = ["demo", "--quick", "--steps", "4"]


def arguments(folder: Path, *more: object) -> list[str]:
    return [*QUICK, "--source", str(folder / "texts"), "--out", "demo", *map(str, more)]


def test_it_does_all_of_it_and_again(box: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(arguments(box, "--text", box / "texts" / "test" / "0.txt", "--model", "code")) == 0
    printed = capsys.readouterr().out
    for said in (
        "reads 0.txt",
        "in three ways",
        "helped to predict",
        "two memories",
        "A fork costs nothing",
        "resumed",
    ):
        assert said in printed
    found = json.loads(Path("demo/demo.json").read_text())["found"]
    assert set(found["worth"]["bits_per_token"]) == {"with its memory", "state cleared", "with nothing"}
    one, two = found["training"]["runs"].values()
    assert one == two
    assert one["step"] == 4
    page = Path("demo/report.html").read_text()
    for said in ("Summary", "Words that the memory helped to predict", one["weights"][:16]):
        assert said in page
    assert "http" not in page, "nothing is fetched"
    assert 'name="viewport"' in page
    titles, results = (re.findall(pattern, printed, re.M) for pattern in (r"^\d+\. ", r"^=> "))
    assert len(titles) == len(results) == 7, "each step says what it has shown"
    metrics = Path("demo/resumed/metrics.jsonl").read_text()
    assert main(["memory", "info", "demo/document.memory"]) == 0
    assert main(arguments(box, "--text", box / "texts" / "test" / "0.txt", "--model", "code")) == 0
    assert Path("demo/resumed/metrics.jsonl").read_text() == metrics
    assert json.loads(Path("demo/demo.json").read_text())["found"]["worth"] == found["worth"]


def test_it_reads_a_module_of_python_by_default(box: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(arguments(box)) == 0
    printed = capsys.readouterr().out
    assert "'code' reads " in printed
    assert ".py, which it has never seen" in printed
    assert "brt train --init-from code" in printed


def test_without_a_model_it_trains_only(
    box: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(models, "ROOM", tmp_path)
    assert main(arguments(box)) == 0
    printed = capsys.readouterr().out
    assert "built without bundled models" in printed
    assert "the same weights, bit for bit" in printed
    assert "stopped and resumed" in Path("demo/report.html").read_text()


def test_it_harms_no_files(box: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    Path("demo").mkdir()
    Path("demo/thesis.txt").write_text("all of it")
    assert main(arguments(box)) == 2
    assert capsys.readouterr().err == ("brt: error: 'demo' exists and is not a demo folder: choose another --out\n")
    assert [path.name for path in Path("demo").iterdir()] == ["thesis.txt"]
    Path("demo/thesis.txt").rename("demo/demo.json")
    assert main(arguments(box)) == 1
    Path("demo/demo.json").write_text('{"settings": {}}')
    assert main(arguments(box)) == 2
    assert "other settings" in capsys.readouterr().err


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "demo")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_as_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "block_recurrent", "demo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs" / "demo" / "demo.json").read_text())["found"]
    assert found["training"]["runs"]["uninterrupted"]["held_out_bits"] < 3.5
    if models.names():
        bits = found["worth"]["bits_per_token"]
        assert bits["with its memory"] < bits["state cleared"] < bits["with nothing"]

"""The Python of docs/writing.md and docs/hub.md runs as it stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def python_of(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


@pytest.fixture
def folder(make_reader: Callable, make_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs").mkdir()
    make_run(make_reader(), name="runs/first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_writing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, engine = python_of("writing.md")
    exec(session, {})
    assert capsys.readouterr().out
    names: dict = {}
    exec(engine, names)
    assert names["memory"].tokens_read.tolist() == [110]
    assert (folder / "book.memory").is_file()


def test_hub(folder: Path) -> None:
    assert main(["export", "runs/first", "hf/first"]) == 0
    names = {"book": "The captain of the sea. " * 20}
    loading, reading, scoring = python_of("hub.md")
    exec(loading, names)
    exec(reading, names)
    assert names["memory"].tokens_read == [len(names["book"])]

    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
    (folder / "books" / "test").mkdir(parents=True)
    (folder / "books" / "test" / "a.txt").write_text(names["book"])
    exec(scoring, names)
    assert main(["data", "prepare", "books", "--out", "build/books"]) == 0
    assert main(["eval", "runs/first", "--data", "build/books", "--json", "scores.json"]) == 0
    expected = json.loads(Path("scores.json").read_text())["bits_per_byte"]
    assert names["found"]["results"]["books"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)

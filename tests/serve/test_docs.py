"""The examples of docs/serving.md, against a served model."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_recurrent.serve.limits import Limits

from .conftest import Served, book, serving

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "http://127.0.0.1:8000"


def blocks(kind: str, page: str = "serving.md") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(book(200))
    with serving(tmp_path / "memories", Limits(), name="first") as served:
        yield served


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_and_examples_run(first: Served) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        done = subprocess.run(command.replace(ADDRESS, first.url), shell=True, capture_output=True, text=True)
        assert done.returncode == 0, command
        assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"
    names = [memory["name"] for memory in first.client.get("/v1/memories").json()["data"]]
    assert names == ["book", "sent"]
    pytest.importorskip("openai", reason="needs OpenAI's client")
    for example in blocks("python"):
        exec(compile(example.replace(ADDRESS, first.url), "serving.md", "exec"), {})


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_tutorial_runs(first: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="needs OpenAI's client")
    page = "tutorials/serve.md"
    for command in [line for block in blocks("sh", page) for line in block.splitlines()]:
        done = subprocess.run(command.replace(ADDRESS, first.url), shell=True, capture_output=True, text=True)
        assert done.returncode == 0, command
        assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"
    generate, score = blocks("python", page)
    exec(compile(generate.replace(ADDRESS, first.url), page, "exec"), {})
    assert {m["name"] for m in first.client.get("/v1/memories").json()["data"]} == {"novel", "novel-1"}
    capsys.readouterr()
    exec(compile(score.replace(ADDRESS, first.url), page, "exec"), {})
    assert len(eval(capsys.readouterr().out)) == 3  # with the memory, without its state, with an empty one

"""The README stays true: its commands and its example are run, at a size that takes seconds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from block_recurrent.cli.main import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
MODELS = re.compile(r"<!-- models -->.*?<!-- /models -->\n", flags=re.DOTALL)
if "models" not in COMMANDS:  # the section on the models of the package, while it has none
    README = MODELS.sub("", README)
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
    return [line for line in lines if line.startswith("brt ")]


def smaller(command: str) -> list[str]:
    """The same command at size micro, for a few steps."""
    command = re.sub(r"--size \w+", "--size micro", command)
    return shlex.split(re.sub(r"--steps \d+", "--steps 3", command))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder `my-books` with some text, where the commands are run."""
    books = tmp_path / "my-books"
    books.mkdir()
    for number in range(6):
        (books / f"book-{number}.txt").write_text(f"Chapter {number}. It was a bright cold day. " * 60)
    return tmp_path


def test_every_command_runs(folder: Path) -> None:
    assert len(commands()) >= 3
    for command in commands():
        done = subprocess.run(
            [sys.executable, "-m", "block_recurrent", *smaller(command)[1:]], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_example_runs(tmp_path: Path) -> None:
    examples = [block for kind, block in BLOCKS if kind == "python"]
    assert examples
    for example in examples:
        done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_make_targets_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    contributing = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)", README + contributing, flags=re.MULTILINE)
    assert {"demo", "test", "docs"} <= set(targets)
    for target in targets:
        assert f"\n{target}:" in makefile


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (Path(__file__).parent.parent / link).exists(), link


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150
    results = README.partition("## Results")[2].partition("##")[0]
    assert len(re.findall(r"^\| ", results, flags=re.MULTILINE)) <= 2 + 8

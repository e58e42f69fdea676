"""docs/extending.md stays true: its code is run as it stands there, its commands at a size that takes seconds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (DOCS / "extending.md").read_text(encoding="utf-8"), flags=re.DOTALL)
PYTHON = [block for kind, block in BLOCKS if kind == "python"]
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        (tmp_path / "books" / split).mkdir(parents=True)
        for number in range(8):
            text = f"Chapter {number}. It was a bright cold day. " * 60
            (tmp_path / "books" / split / f"book-{number}.txt").write_text(text)
    return tmp_path


def test_a_gate_of_ones_own(books: Path) -> None:
    (books / "highway.py").write_text(PYTHON[0])
    run([sys.executable, "-m", "block_recurrent", "data", "prepare", "books", "--out", "build/books"], books)
    for command in COMMANDS:
        words = shlex.split(command.replace("--size tiny", "--size micro --steps 3 --lanes 2"))
        run([sys.executable, *words[1:]], books)
    metrics = (books / "runs" / "highway" / "metrics.jsonl").read_text()
    assert "attention_gate/keep" in metrics


def test_an_update_of_ones_own(tmp_path: Path) -> None:
    check = (
        "\nimport torch\nlogits, memory = model(torch.zeros(1, 40, dtype=torch.long))\nprint(logits.isfinite().all())"
    )
    assert run([sys.executable, "-c", PYTHON[1] + check], tmp_path).strip() == "tensor(True)"


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (DOCS / link).exists(), f"{page.name}: {link}"

"""A box with two models of size micro, trained for a moment: `code` in bytes, `books` with a vocabulary."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from block_recurrent import models
from block_recurrent.cli.main import main
from tests.made_text import make_text

ABOUT = """
summary = "a model for tests"
data = "Made-up words."
licence = "CC0-1.0"
command = "brt train --system rec-fixed-skip --size micro"
limits = ["It knows no language."]
[[samples]]
title = "Without a memory"
text = "ba be"
"""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """texts/, data-code, data-books, run-code, run-books, and box/ with the two models packed."""
    folder = tmp_path_factory.mktemp("workshop")
    chance = random.Random(0)
    for split, count in (("train", 6), ("validation", 2), ("test", 3)):
        (folder / "texts" / split).mkdir(parents=True)
        for number in range(count):
            (folder / "texts" / split / f"{number}.txt").write_text(make_text(chance)[:6000])
    (folder / "about.toml").write_text(ABOUT)
    command("tokenizer", "train", "--vocab-size", 600, "--out", folder / "books.model", folder / "texts")
    for name, tokenizer in (("code", "bytes"), ("books", folder / "books.model")):
        data, run = folder / f"data-{name}", folder / f"run-{name}"
        command("data", "prepare", folder / "texts", "--out", data, "--tokenizer", tokenizer)
        command("train", "--system", "rec-fixed-skip", "--size", "micro", "--data", data, "--out", run,
                "--steps", 12, "--lanes", 4, "--eval-tokens", 1000)  # fmt: skip
        command("eval", run, "--data", data, "--json", folder / f"{name}.json")
        command("eval", run, "--data", data, "--clear-every", 64, "--json", folder / f"{name}-cleared.json")
        command("models", "pack", run, "--name", name, "--out", folder / "box" / name, "--about", folder / "about.toml",
                "--data", data, "--memory", folder / f"{name}.json", "--cleared", folder / f"{name}-cleared.json",
                "--twin", folder / f"{name}.json")  # fmt: skip
    return folder


@pytest.fixture
def box(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workshop, with its models in the box, and a folder of its own to work in."""
    monkeypatch.setattr(models, "ROOM", workshop / "box")
    monkeypatch.chdir(tmp_path)
    return workshop


def command(*words: object) -> None:
    assert main([str(word) for word in words]) == 0, words

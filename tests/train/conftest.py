"""A little prepared corpus, and runs on it that take seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from block_recurrent.data import load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.run_config import RunConfig, merge, resolve

FAMILIES = ("xl", "slide", "rec-fixed-skip", "rec-lstm-dual", "feedback-lstm-single", "memorizing")
TIMING = ("tokens_per_second", "data_wait")
TEXT = "the of and to a in that he was it his her with as had for she not at but be on they have him which said"


def write_documents(folder: Path, count: int, seed: int) -> None:
    """Texts of 40 to 400 words, always the same ones."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    for index in range(count):
        (folder / f"{index}.txt").write_text(" ".join(chance.choices(TEXT.split(), k=chance.randrange(40, 400))))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data: 12 documents for training, 3 for validation, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "text" / "train", 12, seed=1)
    write_documents(folder / "text" / "validation", 3, seed=2)
    prepare(PrepareSettings(sources=(str(folder / "text"),), threads=1), load_tokenizer("bytes"), folder / "data")
    return folder / "data"


@pytest.fixture
def make_config(corpus: Path) -> Callable[..., RunConfig]:
    """`make_config(system, **{"section.key": value})`: a micro run of 12 steps on the little corpus."""

    def make(system: str = "rec-fixed-skip", **settings: Any) -> RunConfig:
        given: dict[str, Any] = {
            "system": system,
            "size": "micro",
            "data": {"path": str(corpus)},
            "train": {"steps": 12, "lanes": 4, "save_every": 4, "device": "cpu"},
            "model": {"vocab_size": 257, "num_layers": 3},
            "eval": {"every": 6, "tokens": 512},
        }
        for path, value in settings.items():
            section, _, key = path.partition(".")
            given = merge(given, {section: {key: value}})
        return resolve(given, vocab_size=257)

    return make


def read_metrics(run: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in TIMING}
        for record in records
        if split in (None, record["split"])
    ]


def checkpoint_contents(run: Path, step: int) -> dict[str, Any]:
    """Every number of a checkpoint, by file; a memory as the bits of its tensors."""
    contents: dict[str, Any] = {}
    for path in sorted((run / "checkpoints" / f"step-{step:08d}").iterdir()):
        if path.suffix == ".safetensors":
            contents[path.name] = {name: x.numpy().tobytes() for name, x in load_file(path).items()}
        elif path.name == "state.json":
            contents[path.name] = json.loads(path.read_text())
    return contents

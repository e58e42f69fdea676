"""Prepared folders and run folders for tests of measuring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.run_config import DataConfig, RunConfig

from ..run_folders import save_run


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """`make_corpus({"a.txt": "text"}, split="test")`: a folder prepared with bytes."""

    def make(texts: dict[str, str], split: str = "test", name: str = "books", tokenizer: str = "bytes") -> Corpus:
        source = tmp_path / "sources" / name / split
        source.mkdir(parents=True)
        for file, text in texts.items():
            (source / file).write_bytes(text.encode())
        settings = PrepareSettings((str(source.parent),), threads=1)
        return prepare(settings, load_tokenizer(tokenizer), tmp_path / name)

    return make


@pytest.fixture
def make_reader() -> Callable[..., BlockRecurrentLM]:
    """`make_reader(system, **fields)`: a random float32 model that reads bytes, in eval mode."""

    def make(system: str = "rec-fixed-skip", seed: int = 0, **fields: object) -> BlockRecurrentLM:
        torch.manual_seed(seed)
        return BlockRecurrentLM(preset(system, "micro", vocab_size=257).replace(**fields)).eval()

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(model, name)`: a run's folder with this model in it."""

    def make(model: BlockRecurrentLM, name: str = "run", system: str = "rec-fixed-skip", step: int = 7) -> Path:
        config = RunConfig(system, "micro", model.config, DataConfig(path="somewhere"))
        save_run(tmp_path / name, config, model, load_tokenizer("bytes"), step)
        return tmp_path / name

    return make

"""Runs on disk, exported folders, and what they are made of, for tests with other people's libraries."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.data.tokenizer import tokenizer_from_model
from block_recurrent.run_config import DataConfig, RunConfig
from block_recurrent.studies.run_folder import save_run

TEXT = "the white whale of the sea and the captain's leg: naïve harpoon, straße. " * 40


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="session")
def subwords() -> Tokenizer:
    """A small vocabulary of the kind that `brt tokenizer train` makes: exact, with byte fallback."""
    return _train(
        normalization_rule_name="identity",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
    )


def _train(**settings: object) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split(". ")),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return tokenizer_from_model(model.getvalue(), "a test's vocabulary")


@pytest.fixture
def make_reader() -> Callable[..., BlockRecurrentLM]:
    """`make_reader(system, vocab_size=257)`: a random model in eval mode, that retrieves all it remembers (n = M)."""

    def make(
        system: str = "rec-fixed-skip", vocab_size: int = 257, seed: int = 0, **fields: object
    ) -> BlockRecurrentLM:
        torch.manual_seed(seed)
        return BlockRecurrentLM(preset(system, "micro", vocab_size, memory_neighbors=64).replace(**fields)).eval()

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(model, tokenizer, name)`: a run's folder with this model in it."""

    def make(model: BlockRecurrentLM, tokenizer: Tokenizer | None = None, name: str = "run") -> Path:
        config = RunConfig("rec-fixed-skip", "micro", model.config, DataConfig(path="somewhere"))
        save_run(tmp_path / name, config, model, tokenizer or load_tokenizer("bytes"), 7)
        return tmp_path / name

    return make


@pytest.fixture
def exported(make_reader: Callable, make_run: Callable, tmp_path: Path) -> Callable[..., Path]:
    """`exported(system, tokenizer)`: the folder that `brt export` writes."""
    from block_recurrent.hub.export import export_folder

    def export(system: str = "rec-fixed-skip", tokenizer: Tokenizer | None = None, **fields: object) -> Path:
        vocab_size = 257 if tokenizer is None else tokenizer.vocab_size
        run = make_run(make_reader(system, vocab_size, **fields), tokenizer, name=f"run-{system}")
        export_folder(run, tmp_path / f"hf-{system}")
        return tmp_path / f"hf-{system}"

    return export

"""Models that read bytes or subwords, and runs on disk, for tests of reading and writing."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.data.tokenizers.base import tokenizer_from_model
from block_recurrent.run_config import DataConfig, RunConfig

from ..run_folders import save_run

WORDS = [
    "sea",
    "whale",
    "ship",
    "captain",
    "leg",
    "white",
    "harpoon",
    "straße",
    "naïve",
    "日本",
    "€",
    "the",
    "of",
    "and",
]


def make_text(words: int, seed: int = 0) -> str:
    """Words of several alphabets, with spaces, double spaces, newlines and punctuation between them."""
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", ", ", "  ", "\n", ".\n\n"]) for _ in range(words))


@pytest.fixture
def text() -> Callable[..., str]:
    return make_text


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


@pytest.fixture(scope="session")
def prefixed_subwords() -> Tokenizer:
    """A vocabulary with SentencePiece's own settings, as the authors have: a space in front, white space squeezed."""
    return _train()


def _train(**settings: object) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_text(3000, seed=9).split("\n")),
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

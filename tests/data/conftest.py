"""Fixtures of the data tests: small sources, a small vocabulary of our own, and the shared books where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.data import Corpus
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.data.tokenizers.base import ByteTokenizer, Tokenizer, load_tokenizer
from block_recurrent.data.tokenizers.training import train_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def books() -> Path:
    if not (SHARED / "books").is_dir():
        pytest.skip("the shared books are not beside this repository")
    return SHARED / "books"


@pytest.fixture(scope="session")
def authors(request: pytest.FixtureRequest) -> Tokenizer:
    """The authors' vocabulary of 8000 pieces: it changes white space and has unknown pieces."""
    path = SHARED / "vocabs" / "pg19train_bpe_8000.model"
    if not path.is_file():
        pytest.skip("the authors' vocabularies are not beside this repository")
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def own() -> Tokenizer:
    """A vocabulary of ours, trained on this repository's own source."""
    return train_tokenizer([str(Path(__file__).resolve().parents[2] / "src")], 700)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """`make_corpus({"train/a.txt": b"..."}, tokenizer, **settings)`: writes the files and prepares them."""

    def make(files: dict[str, bytes], tokenizer: Tokenizer | None = None, **settings: Any) -> Corpus:
        source = tmp_path / "source"
        for name, content in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        return prepare(PrepareSettings((str(source),), **settings), tokenizer or ByteTokenizer(), tmp_path / "out")

    return make

"""Exported folders, and what they are made of, for tests with other people's libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent.data import Tokenizer

from ..inference.conftest import byte_tokenizer, make_reader, make_run, subwords

__all__ = ["byte_tokenizer", "make_reader", "make_run", "subwords"]


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

"""The numbers of `brt data info`, per split."""

from __future__ import annotations

from typing import Any

import numpy as np

from block_recurrent.data.corpus import SPLITS, Corpus
from block_recurrent.errors import DataError


def summarize(corpus: Corpus, segment: int) -> dict[str, Any]:
    """`{"splits": {"train": {...}, ...}}`. Ratios of an empty split are None."""
    if segment < 1:
        raise DataError(f"--segment must be at least 1, not {segment}")
    return {
        "tokenizer": corpus.manifest["tokenizer"],
        "vocab_size": corpus.vocab_size,
        "segment": segment,
        "splits": {split: _of_split(corpus, split, segment) for split in SPLITS},
        "left_out": corpus.left_out,
    }


def _of_split(corpus: Corpus, split: str, segment: int) -> dict[str, Any]:
    documents = corpus.documents(split)
    lengths = corpus.lengths(split)
    tokens, positions = int(lengths.sum()), int((lengths + 1).sum())
    totals = {
        key: sum(getattr(document, key) for document in documents)
        for key in ("words", "bytes", "characters", "replaced", "lost", "unknown")
    }
    padded = int((-(-(lengths + 1) // segment) * segment).sum())
    return {
        "documents": len(documents),
        "tokens": tokens,
        **totals,
        "tokens_per_word": _ratio(tokens, totals["words"]),
        "bytes_per_token": _ratio(totals["bytes"], tokens),
        "longest": int(lengths.max(initial=0)),
        "median": float(np.median(lengths)) if documents else None,
        # A document of n tokens has n + 1 positions: the mark that ends it is one, and is no padding.
        "padding": _ratio(padded - positions, padded),
        "lost_share": _ratio(totals["lost"], totals["characters"]),
        "unknown_share": _ratio(totals["unknown"], tokens),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

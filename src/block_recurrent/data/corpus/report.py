"""A summary of a corpus (`brt data info`), and its verification (`brt data verify`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from block_recurrent.data.corpus.corpus import OUR_FILES, Corpus, DocumentInfo, manifest_digest
from block_recurrent.data.sources.document import SPLITS
from block_recurrent.errors import DataError, FileFormatError
from block_recurrent.io.door import COUNT_LIMIT, MANIFEST


def summarize(corpus: Corpus, segment: int) -> dict[str, Any]:
    """The statistics of each split: `{"splits": {"train": {...}, ...}}`. Ratios of an empty split are None."""
    if not 1 <= segment < COUNT_LIMIT:
        raise DataError(f"--segment must be at least 1, not {segment}")
    return {
        "tokenizer": corpus.manifest["tokenizer"],
        "vocab_size": corpus.vocab_size,
        "segment": segment,
        "splits": {split: _of_split(corpus, split, segment) for split in SPLITS},
        "left_out": corpus.left_out,
    }


def problems(corpus: Corpus) -> Iterator[str]:
    """The problems of a corpus, one line each. (Opening it has checked manifest and sizes.)"""
    if corpus.manifest["version"] == 1 and manifest_digest(corpus.manifest) != corpus.manifest["digest"]:
        yield f"{MANIFEST} was changed after it was written"
    _ = corpus.tokenizer  # loading it checks its file, which may not be needed otherwise
    for name in sorted({path.name for path in corpus.folder.iterdir()} - OUR_FILES):
        yield f"'{name}' is not a file of prepared data"
    for split in SPLITS:
        for index, document in enumerate(corpus.documents(split)):
            try:
                if document.exact and not _gives_text_back(corpus, index, document):
                    yield f"{document.name}: its text has changed (SHA-256 differs)"
                corpus.tokens(split, index)
            except (DataError, FileFormatError) as error:
                yield f"{document.name}: {error}"


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
        # A document of n tokens has n + 1 positions: its end is one, and is not padding.
        "padding": _ratio(padded - positions, padded),
        "lost_share": _ratio(totals["lost"], totals["characters"]),
        "unknown_share": _ratio(totals["unknown"], tokens),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _gives_text_back(corpus: Corpus, index: int, document: DocumentInfo) -> bool:
    digest, size = hashlib.sha256(), 0
    for piece in corpus.text_pieces(document.split, index):
        digest.update(piece)
        size += len(piece)
    return digest.hexdigest() == document.sha256 and size == document.bytes

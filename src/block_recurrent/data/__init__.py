"""Documents and tokens.

sources/        documents: files, folders, records, packages
tokenizers/     text to tokens and back
corpus/         prepared folders: documents as tokens on disk
streams/        lanes of segments that feed training and evaluation

No torch here: everything is numpy. docs/data.md describes the public names: `load_tokenizer`, `prepare`, `Corpus`,
`LaneStream` and its base class `SegmentStream`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Corpus": "corpus.corpus",
    "DocumentInfo": "corpus.corpus",
    "LaneStream": "streams.lanes",
    "PrepareSettings": "corpus.prepare",
    "Segment": "streams.segments",
    "SegmentStream": "streams.segments",
    "Tokenizer": "tokenizers.base",
    "load_tokenizer": "tokenizers.base",
    "prepare": "corpus.prepare",
}

if TYPE_CHECKING:
    from block_recurrent.data.corpus.corpus import Corpus as Corpus
    from block_recurrent.data.corpus.corpus import DocumentInfo as DocumentInfo
    from block_recurrent.data.corpus.prepare import PrepareSettings as PrepareSettings
    from block_recurrent.data.corpus.prepare import prepare as prepare
    from block_recurrent.data.streams.lanes import LaneStream as LaneStream
    from block_recurrent.data.streams.segments import Segment as Segment
    from block_recurrent.data.streams.segments import SegmentStream as SegmentStream
    from block_recurrent.data.tokenizers.base import Tokenizer as Tokenizer
    from block_recurrent.data.tokenizers.base import load_tokenizer as load_tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'block_recurrent.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"block_recurrent.data.{_HOMES[name]}"), name)

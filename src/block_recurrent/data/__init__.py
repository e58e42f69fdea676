"""Documents and tokens.

sources/        documents: files, folders, records, packages
tokenizers/     text to tokens and back
corpus/         prepared folders: documents as tokens on disk
streams/        lanes of segments that feed training and evaluation

No torch here: everything is numpy. What other rooms use:

    tokenizer = load_tokenizer("bytes" or "vocabulary.model")
        .size                       pieces of its own; .vocab_size == size + 1, for the document mark
        .eos_token_id               the document mark, == size
        .encode(text)               -> int32 array (no mark)
        .decode(tokens)             -> str; the document mark decodes to nothing
        .decode_bytes(tokens)       -> bytes, for measures per byte and for text that arrives piece by piece
        .sha256, .model             hash and bytes of the vocabulary file (None for bytes)

    corpus = Corpus(folder)         a folder made by `brt data prepare`; checks sizes and index, raises FileFormatError
        .tokenizer, .eos_token_id, .vocab_size
        .documents(split)           -> list of DocumentInfo(name, split, offset, tokens, bytes, words, characters, lost,
                                       unknown, sha256, ...); split is train, validation or test
        .tokens(split, index)       -> read-only memory-mapped array of one document's tokens, no mark
        .lengths(split)             -> int64 array, tokens of each document
        .find(name)                 -> (split, index)
        .text(name)                 -> str, decoded
        .fingerprint                -> str, changes when any document or the tokenizer changes

    corpus = prepare(PrepareSettings(("books/",)), tokenizer, folder)      makes such a folder

    stream = LaneStream(corpus, split, lanes, segment, seed=0, rank=0, world=1, *, one_pass=False, prefetch=2)
        an iterator of Step; endless, or one pass over the split for evaluation; also a context manager; .close()
        Step.tokens, Step.targets   int64 (lanes // world, segment)
        Step.mask                   bool, same shape: what carries training loss (text tokens and the final mark)
        Step.starts                 bool (lanes // world,): this lane begins a document at this step
        Step.cursor                 JSON-serialisable; load_state_dict(step.cursor) continues after this step
        .state_dict()               the cursor of the last step handed out (not of those prefetched)
        .load_state_dict(state)     exact continuation, also with another rank and world of the same total of lanes

A document of n tokens is read as [mark, t_1 .. t_n] with targets [t_1 .. t_n, mark]: n + 1 positions. Padding has the
mark as token and target and mask False, so `targets != eos_token_id` selects exactly the tokens that measures count.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Corpus": "corpus.corpus",
    "DocumentInfo": "corpus.corpus",
    "LaneStream": "streams.lanes",
    "PrepareSettings": "corpus.prepare",
    "Step": "streams.lanes",
    "Tokenizer": "tokenizers.base",
    "load_tokenizer": "tokenizers.base",
    "prepare": "corpus.prepare",
}

__all__ = ["Corpus", "DocumentInfo", "LaneStream", "PrepareSettings", "Step", "Tokenizer", "load_tokenizer", "prepare"]

if TYPE_CHECKING:
    from block_recurrent.data.corpus.corpus import Corpus, DocumentInfo
    from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
    from block_recurrent.data.streams.lanes import LaneStream, Step
    from block_recurrent.data.tokenizers.base import Tokenizer, load_tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'block_recurrent.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"block_recurrent.data.{_HOMES[name]}"), name)

"""How much the memory of a document helps: its second half, scored with it, with the state cleared, and without.

All three score the same tokens. `MEMORY`: the memory covers everything before. `CLEARED`: the recurrent state is
reset at each segment; the window of tokens is kept. `NOTHING`: each window of tokens is read on
its own, after the one token before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.token_text import TokenText
from block_recurrent.data import Tokenizer
from block_recurrent.errors import DataError
from block_recurrent.evaluate.state_edits import LanePosition, clear_every
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.session import Session
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_hash import TextHash
from block_recurrent.io.progress import Progress
from block_recurrent.model.memory import DocumentMemory

MEMORY, CLEARED, NOTHING = "with its memory", "state cleared", "with nothing"
ROWS_AT_ONCE = 32
LIKELY_BITS, LEAST_GAIN, SHORTEST_WORD = 1.0, 1.0, 3
RECENT = 512
Bits = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """A document that was read from beginning to end."""

    tokens: NDArray[np.int64]
    half: int
    """Where the second half begins, at a segment boundary."""
    bits: Bits  # of every token
    at_half: DocumentMemory
    at_end: DocumentMemory
    sizes: list[tuple[int, int]]
    """Progress: tokens read, and bytes of the memory."""


@dataclass(frozen=True)
class RememberedWord:
    """A word that the memory made likely, and its last mention."""

    word: str
    index: int  # of its token in the document
    distance: int  # in tokens, to its last mention
    chance: float  # probability of its token, with the memory
    chance_cleared: float
    before: str  # text before it
    earlier: str  # text around its last mention


def read_document(engine: Engine, tokens: NDArray[Any], progress: Progress | None = None) -> Reading:
    """Read all tokens once, with the loss of each."""
    tokens, segment = np.asarray(tokens, np.int64), engine.config.segment
    half = len(tokens) // 2 // segment * segment
    if not half:
        raise DataError(f"the text has {len(tokens)} tokens: it must have at least two segments, {2 * segment}")
    fed = fed_tokens(engine, tokens)
    memory, at_half, bits, sizes = engine.empty(), engine.empty(), [], []
    for start in range(0, len(tokens), segment):
        end = min(start + segment, len(tokens))
        at_half = memory if start == half else at_half
        scored = engine.score([fed[start:end]], [tokens[start:end]], memory)
        memory = scored.memory
        bits.append(scored.nats[0].astype(np.float64) / math.log(2))
        sizes.append((end, memory.nbytes))
        if progress:
            progress(end, len(tokens))
    return Reading(tokens, half, np.concatenate(bits), at_half, memory, sizes)


def fed_tokens(engine: Engine, tokens: NDArray[Any]) -> NDArray[np.int64]:
    """The inputs to predict these tokens: the document mark, and all but the last."""
    return np.concatenate([[engine.config.eos_token_id], tokens[:-1]]).astype(np.int64)


def three_ways(engine: Engine, reading: Reading, progress: Progress | None = None) -> dict[str, Bits]:
    """The bits of every token of the second half, for each way of reading. Without a recurrent state, two ways."""
    found = {MEMORY: reading.bits[reading.half :]}
    if engine.config.recurrent_layers:
        found[CLEARED] = _with_state_cleared(engine, reading, progress)
    found[NOTHING] = _with_nothing(engine, reading)
    return found


def _with_state_cleared(engine: Engine, reading: Reading, progress: Progress | None) -> Bits:
    tokens, segment, half = reading.tokens, engine.config.segment, reading.half
    fed, edit = fed_tokens(engine, tokens), clear_every(engine.snapshot.model, segment)
    memory, bits = reading.at_half, []
    for start in range(half, len(tokens), segment):
        memory = edit.apply(memory, [LanePosition(0, start)])
        scored = engine.score([fed[start : start + segment]], [tokens[start : start + segment]], memory)
        memory = scored.memory
        bits.append(scored.nats[0].astype(np.float64) / math.log(2))
        if progress:
            progress(min(start + segment, len(tokens)) - half, len(tokens) - half)
    return np.concatenate(bits)


def _with_nothing(engine: Engine, reading: Reading) -> Bits:
    tokens, window = reading.tokens, engine.config.window
    fed, bits = fed_tokens(engine, tokens), []
    starts = range(reading.half, len(tokens), window)
    for first in range(0, len(starts), ROWS_AT_ONCE):
        rows = [slice(start, start + window) for start in starts[first : first + ROWS_AT_ONCE]]
        scored = engine.score([fed[row] for row in rows], [tokens[row] for row in rows])
        bits += [nats.astype(np.float64) / math.log(2) for nats in scored.nats]
    return np.concatenate(bits)


def remembered_words(
    reading: Reading, ways: dict[str, Bits], tokenizer: Tokenizer, window: int, count: int = 10
) -> list[RememberedWord]:
    """Words last seen beyond the window that the memory made likely, and more than twice as likely; each word once."""
    text = TokenText(reading.tokens, tokenizer)
    without = ways.get(CLEARED, ways[NOTHING])
    gains, distances = without - ways[MEMORY], text.distances[reading.half :]
    order = np.argsort(-gains, kind="stable")
    is_likely = (ways[MEMORY] <= LIKELY_BITS) & (gains > LEAST_GAIN)
    found: dict[str, RememberedWord] = {}
    for place in order[is_likely[order]].tolist():
        index, distance = reading.half + place, int(distances[place])
        word = text.word(index)
        if distance <= window or len(word) < SHORTEST_WORD or not word.isalnum() or word.casefold() in found:
            continue
        before = text.excerpt(index, before_bytes=60, after_bytes=0)[0]
        earlier = "".join(text.excerpt(index - distance, before_bytes=40, after_bytes=20))
        chances = [2.0 ** -float(bits[place]) for bits in (ways[MEMORY], without)]
        found[word.casefold()] = RememberedWord(word, index, distance, chances[0], chances[1], before, earlier)
        if len(found) == count:
            break
    return list(found.values())


def session_at(engine: Engine, tokenizer: Tokenizer, reading: Reading, place: int, name: str) -> Session:
    """A session in the middle or at the end of a document that was read."""
    assert place in (reading.half, len(reading.tokens))
    tokens = reading.tokens[:place]
    state = SessionState(
        memory=reading.at_half if place == reading.half else reading.at_end,
        pending=int(tokens[-1]),
        recent=tuple(tokens[-RECENT:].tolist()),
        text=TextHash().update(tokenizer.decode_bytes(tokens)),
    )
    return Session(engine, tokenizer, name=name, state=state)

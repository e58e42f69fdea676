"""The loss of every token of whole documents, each exactly once, with the memory carried throughout.

    document of n tokens:   read    [mark, t_1, ... t_n-1]
                            scored  [t_1,  t_2, ... t_n  ]

A lane reads one document to its end and then takes the longest remaining one. The results depend neither on the
number of lanes nor on where calls end, and memory use does not depend on the documents' length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.state_edits import LanePosition, StateEdit
from block_recurrent.inference.engine import Engine, Scored
from block_recurrent.io.progress import Progress
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

DEFAULT_LANES = 8
TOKENS_AT_ONCE = 4096
"""Minimum number of tokens per call, over all lanes: small calls are dominated by overhead."""


class Piece(NamedTuple):
    """Losses of consecutive tokens of a document; the pieces of one document are in order."""

    document: int
    start: int  # index of its first token in the document
    nats: NDArray[np.float32]

    @property
    def bits(self) -> NDArray[np.float64]:
        return self.nats.astype(np.float64) / math.log(2)


class Scorer(Protocol):
    """The interface for scoring: an `Engine`, or a module in training."""

    @property
    def config(self) -> ModelConfig: ...
    def score(
        self, rows: list[NDArray[np.int64]], targets: list[NDArray[np.int64]], memory: DocumentMemory | None
    ) -> Scored: ...


def score(
    model: BlockRecurrentLM | Scorer,
    documents: Sequence[NDArray[Any]],
    lanes: int = DEFAULT_LANES,
    chunk: int | None = None,
    edit: StateEdit | None = None,
    progress: Progress | None = None,
) -> Iterator[Piece]:
    """Score documents, and yield the losses as they are computed.

    Args:
        model: a model, or an `Engine`.
        documents: arrays of tokens, without document marks.
        lanes: the number of documents scored in parallel.
        chunk: tokens per lane and call; default: whole segments.
        edit: an experiment on the state, such as `clear_every`.
        progress: called with the number of tokens done and their total.
    """
    done, whole = 0, sum(map(len, documents))
    scorer: Scorer = Engine(model) if isinstance(model, BlockRecurrentLM) else model
    config = scorer.config
    if chunk is None:
        segments = TOKENS_AT_ONCE // (config.segment * max(1, min(lanes, len(documents))))
        chunk = config.segment * max(1, segments)
    for name, value in (("lanes", lanes), ("chunk", chunk)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}: it must be at least 1")
    reading = _Reading(documents, lanes, config.eos_token_id)
    while reading.places:
        ends = [edit.next_border(p.position) if edit else p.position + chunk for p in reading.places]
        call = reading.next_call([min(chunk, end - p.position) for p, end in zip(reading.places, ends, strict=True)])
        memory = reading.memory
        if memory is not None:
            memory = memory.restart([place.position == 0 for place in reading.places])
            memory = memory if edit is None else edit.apply(memory, reading.places)
        scored = scorer.score(call.tokens, call.targets, memory)
        for place, nats in zip(reading.places, scored.nats, strict=True):
            yield Piece(place.document, place.position, nats)
            done += len(nats)
            if progress:
                progress(done, whole)
        reading.advance([len(nats) for nats in scored.nats], scored.memory)


class _Call(NamedTuple):
    """A row per lane."""

    tokens: list[NDArray[np.int64]]
    targets: list[NDArray[np.int64]]


@dataclass
class _Reading:
    """The position and memory of each lane."""

    documents: Sequence[NDArray[Any]]
    lanes: int
    eos_token_id: int
    places: list[LanePosition] = field(default_factory=list)
    memory: DocumentMemory | None = None

    def __post_init__(self) -> None:
        # Longest first: a simple rule that lets lanes end close together.
        order = sorted(range(len(self.documents)), key=lambda i: -len(self.documents[i]))
        self._queue = [i for i in order if len(self.documents[i])][::-1]
        self.places = [LanePosition(self._queue.pop(), 0) for _ in range(min(self.lanes, len(self._queue)))]

    def next_call(self, wanted: list[int]) -> _Call:
        """The next tokens of every lane, up to a maximum number."""
        lengths = [
            min(n, len(self.documents[p.document]) - p.position) for n, p in zip(wanted, self.places, strict=True)
        ]
        call = _Call([], [])
        for (document, position), length in zip(self.places, lengths, strict=True):
            text = self.documents[document][max(position - 1, 0) : position + length].astype(np.int64)
            if position == 0:  # the document mark precedes the first token
                text = np.concatenate([[self.eos_token_id], text])
            call.tokens.append(text[:-1])
            call.targets.append(text[1:])
        return call

    def advance(self, lengths: list[int], memory: DocumentMemory) -> None:
        """Advance; lanes whose document has ended take the next, or close."""
        moved = [
            LanePosition(p.document, p.position + length)
            if p.position + length < len(self.documents[p.document])
            else (LanePosition(self._queue.pop(), 0) if self._queue else None)
            for p, length in zip(self.places, lengths, strict=True)
        ]
        open_lanes = [lane for lane, place in enumerate(moved) if place is not None]
        self.places = [place for place in moved if place is not None]
        if open_lanes:
            self.memory = memory if len(open_lanes) == len(moved) else memory.select(open_lanes)


def bits_of(
    model: BlockRecurrentLM | Scorer, documents: Sequence[NDArray[Any]], **options: Any
) -> list[NDArray[np.float32]]:
    """The bits of every token, by document; options as in `score`."""
    bits = [np.empty(len(document), np.float32) for document in documents]
    for piece in score(model, documents, **options):
        bits[piece.document][piece.start : piece.start + len(piece.nats)] = piece.bits
    return bits

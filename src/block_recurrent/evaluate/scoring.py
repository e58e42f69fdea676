"""The loss of every token of whole documents, each exactly once, with the memory carried throughout.

    document of n tokens:   read    [mark, t_1, ... t_n-1]
                            scored  [t_1,  t_2, ... t_n  ]

A lane reads one document to its end and then takes the longest that is left. What is computed depends neither on the
number of lanes nor on where calls end (SPEC section 10), and what is held does not depend on the documents' length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from block_recurrent.errors import ConfigError
from block_recurrent.evaluate.state_edits import Place, StateEdit
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

DEFAULT_LANES = 8
TOKENS_AT_ONCE = 4096
"""Of a call, over all lanes, where a segment is not more: small calls take longer to begin than to do."""


class Piece(NamedTuple):
    """Losses of consecutive tokens of a document; the pieces of one document come in order."""

    document: int
    start: int
    """Index of its first token in the document."""
    nats: NDArray[np.float32]


@torch.inference_mode()
def score(
    model: BlockRecurrentLM,
    documents: Sequence[NDArray[Any]],
    lanes: int = DEFAULT_LANES,
    chunk: int | None = None,
    edit: StateEdit | None = None,
) -> Iterator[Piece]:
    """Score documents (arrays of tokens, without marks). chunk: tokens of a call per lane; None: whole segments."""
    if chunk is None:
        segments = TOKENS_AT_ONCE // (model.config.segment * max(1, min(lanes, len(documents))))
        chunk = model.config.segment * max(1, segments)
    for name, value in (("lanes", lanes), ("chunk", chunk)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}: it must be at least 1")
    assert not model.training, "a model in training mode drops numbers at random"
    reading = _Reading(documents, lanes, model.config.vocab_size - 1)
    while reading.places:
        ends = [edit.next_border(p.position) if edit else p.position + chunk for p in reading.places]
        call = reading.next_call([min(chunk, end - p.position) for p, end in zip(reading.places, ends, strict=True)])
        memory = reading.memory
        if edit is not None and memory is not None:
            memory = edit.apply(memory, reading.places)
        device = model.embedding.weight.device
        tokens, targets = (torch.from_numpy(x).to(device) for x in (call.tokens, call.targets))
        loss = model.loss(
            tokens, targets, memory, torch.tensor([p.position == 0 for p in reading.places]), lengths=call.lengths
        )
        nats = loss.per_token.float().cpu().numpy()
        for lane, (place, length) in enumerate(zip(reading.places, call.lengths.tolist(), strict=True)):
            yield Piece(place.document, place.position, nats[lane, :length])
        reading.advance(call.lengths.tolist(), loss.memory)


class _Call(NamedTuple):
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: torch.Tensor


@dataclass
class _Reading:
    """Which lane stands where, and what it remembers."""

    documents: Sequence[NDArray[Any]]
    lanes: int
    mark: int
    places: list[Place] = field(default_factory=list)
    memory: DocumentMemory | None = None

    def __post_init__(self) -> None:
        # Longest first: lanes then end as close together as a simple rule can bring them.
        order = sorted(range(len(self.documents)), key=lambda i: -len(self.documents[i]))
        self._queue = [i for i in order if len(self.documents[i])][::-1]
        self.places = [Place(self._queue.pop(), 0) for _ in range(min(self.lanes, len(self._queue)))]

    def next_call(self, wanted: list[int]) -> _Call:
        """The next tokens of every lane, at most as many as wanted."""
        lengths = [
            min(n, len(self.documents[p.document]) - p.position) for n, p in zip(wanted, self.places, strict=True)
        ]
        tokens = np.full((len(lengths), max(lengths)), self.mark, np.int64)
        targets = tokens.copy()
        for lane, ((document, position), length) in enumerate(zip(self.places, lengths, strict=True)):
            text = self.documents[document]
            first = 1 if position == 0 else 0  # the document mark comes before the first token
            tokens[lane, first:length] = text[position - 1 + first : position + length - 1]
            targets[lane, :length] = text[position : position + length]
        return _Call(tokens, targets, torch.tensor(lengths))

    def advance(self, lengths: list[int], memory: DocumentMemory) -> None:
        """Move on; lanes whose document has ended take the next, or close."""
        moved = [
            Place(p.document, p.position + length)
            if p.position + length < len(self.documents[p.document])
            else (Place(self._queue.pop(), 0) if self._queue else None)
            for p, length in zip(self.places, lengths, strict=True)
        ]
        open_lanes = [lane for lane, place in enumerate(moved) if place is not None]
        self.places = [place for place in moved if place is not None]
        if open_lanes:
            self.memory = memory if len(open_lanes) == len(moved) else memory.select(open_lanes)

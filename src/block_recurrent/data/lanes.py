"""Lanes: streams of whole documents in segments, for training and evaluation.

A document of n tokens is read as [mark, t_1 .. t_n] with targets [t_1 .. t_n, mark]. Its last segment is padded with
marks, and `mask` is False there. The mask marks what carries training loss: the text's tokens and the mark that ends
them. Measures count `targets != mark`: neither the mark nor padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.dealing import Dealer, Place
from block_recurrent.data.prefetch import Prefetcher
from block_recurrent.errors import DataError

Cursor = dict[str, Any]


class TokenDocuments(Protocol):
    """What a stream needs of a corpus."""

    mark: int

    @property
    def fingerprint(self) -> str: ...
    def lengths(self, split: str) -> NDArray[np.int64]: ...
    def tokens(self, split: str, index: int) -> NDArray[Any]: ...


class Step(NamedTuple):
    """One segment for each lane of this rank."""

    tokens: NDArray[np.int64]  # (lanes, segment)
    targets: NDArray[np.int64]  # (lanes, segment)
    mask: NDArray[np.bool_]  # (lanes, segment): carries training loss
    starts: NDArray[np.bool_]  # (lanes,): a document begins here
    cursor: Cursor  # continues after this step; JSON-serialisable


class LaneStream:
    """An endless iterator of steps over a split, or with `one_pass` each document once and then an end.

    `lanes` counts all ranks; rank r of `world` gets the r-th share, and the stream of all lanes is the same for any
    world. Steps are built ahead in a thread; `close` (or leaving a with-block) ends it.
    """

    def __init__(
        self,
        corpus: TokenDocuments,
        split: str,
        lanes: int,
        segment: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        *,
        one_pass: bool = False,
        prefetch: int = 2,
    ) -> None:
        _check_sizes(lanes, segment, seed, rank, world)
        self._corpus, self._split = corpus, split
        self._lengths = corpus.lengths(split)
        if len(self._lengths) == 0:
            raise DataError(f"split '{split}' has no documents; prepare more text, or choose another split")
        self._segment, self._prefetch = segment, prefetch
        self._lanes = range(rank * lanes // world, (rank + 1) * lanes // world)
        self._identity: Cursor = {
            "corpus": corpus.fingerprint,
            "split": split,
            "lanes": lanes,
            "segment": segment,
            "seed": seed,
            "one_pass": one_pass,
        }
        self._steps: Prefetcher[Step] | None = None
        self._cursor = _cursor_of(self._new_dealer(), self._identity)

    def __iter__(self) -> LaneStream:
        return self

    def __next__(self) -> Step:
        if self._steps is None:
            reader = _SegmentReader(self._corpus, self._split, self._segment)
            steps = _steps(self._dealer_at(self._cursor), self._lanes, reader, self._identity)
            self._steps = Prefetcher(steps, self._prefetch)
        step = next(self._steps)
        self._cursor = step.cursor
        return step

    def __enter__(self) -> LaneStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread that builds ahead. The stream may be used again: it goes on after the last step it gave."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def state_dict(self) -> Cursor:
        """Where the stream is: after the last step it gave, whatever has been built ahead."""
        return self._cursor

    def load_state_dict(self, state: Cursor) -> None:
        """Goes to a state of a stream of the same corpus, split, lanes, segment and seed; rank and world may differ."""
        self._dealer_at(state)
        self.close()
        self._cursor = state

    def _new_dealer(self) -> Dealer:
        who = self._identity
        return Dealer(self._lengths, who["lanes"], self._segment, who["seed"], who["one_pass"])

    def _dealer_at(self, state: Cursor) -> Dealer:
        for key, here in self._identity.items():
            there = state.get(key) if isinstance(state, dict) else None
            if there != here:
                raise DataError(f"this state belongs to another stream: its {key} is {there!r}, here it is {here!r}")
        dealer = self._new_dealer()
        try:
            dealer.move_to(int(state["epoch"]), int(state["taken"]))
            dealer.places = [place and Place(*map(int, place)) for place in state["places"]]
            lanes_agree = len(dealer.places) == self._identity["lanes"]
            in_range = all(
                0 <= place.document < len(self._lengths) and 0 <= place.segment < dealer.segments[place.document]
                for place in dealer.places
                if place
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this state of a stream is damaged: {error!r}") from None
        if not (lanes_agree and in_range and 0 <= dealer.taken <= len(self._lengths)):
            raise DataError("this state of a stream is damaged: it points outside the documents")
        return dealer


class _SegmentReader:
    """Fills one lane's row of a step from a document's tokens."""

    def __init__(self, corpus: TokenDocuments, split: str, segment: int) -> None:
        self._corpus, self._split, self._segment = corpus, split, segment

    def read(self, places: list[Place | None], cursor: Cursor) -> Step:
        shape = (len(places), self._segment)
        inputs, targets = np.full(shape, self._corpus.mark), np.full(shape, self._corpus.mark)
        mask = np.zeros(shape, np.bool_)
        for lane, place in enumerate(places):
            if place:
                text = self._corpus.tokens(self._split, place.document)
                begin = place.segment * self._segment
                ahead = text[begin : begin + self._segment]
                targets[lane, : len(ahead)] = ahead
                # One more than the tokens ahead, where they end inside the segment: the mark is predicted too.
                mask[lane, : len(ahead) + 1] = True
                first = 1 if begin == 0 else 0
                behind = text[begin - 1 + first : begin + len(ahead)][: self._segment - first]
                inputs[lane, first : first + len(behind)] = behind
        starts = np.array([place is not None and place.segment == 0 for place in places], np.bool_)
        return Step(inputs, targets, mask, starts, cursor)


def _steps(dealer: Dealer, lanes: range, reader: _SegmentReader, identity: Cursor) -> Iterator[Step]:
    # Not a method: the thread that runs this must not keep the stream alive.
    while any(places := dealer.deal()):
        yield reader.read([places[lane] for lane in lanes], _cursor_of(dealer, identity))


def _cursor_of(dealer: Dealer, identity: Cursor) -> Cursor:
    places = [place and [place.document, place.segment] for place in dealer.places]
    return {**identity, "epoch": dealer.epoch, "taken": dealer.taken, "places": places}


def _check_sizes(lanes: int, segment: int, seed: int, rank: int, world: int) -> None:
    for name, value, least in (("lanes", lanes, 1), ("segment", segment, 1), ("world", world, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"{name} must be at least {least}, not {value}")
    if not 0 <= rank < world:
        raise DataError(f"rank must be 0 to {world - 1} in a world of {world}, not {rank}")
    if lanes % world:
        raise DataError(f"{lanes} lanes can't be shared by {world} processes: lanes must be a multiple of {world}")

"""Lanes over a corpus: whole documents in segments, for training and evaluation.

The last segment of a document is padded with document marks, and `mask` is False there: it is True for the tokens of
the text and the mark that ends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.streams.prefetch import Prefetcher
from block_recurrent.data.streams.repeats import Repeats
from block_recurrent.data.streams.segments import Cursor, Segment, SegmentStream
from block_recurrent.errors import DataError

# A document starts at the latest this many times its length before the ideal end of an epoch. On books, lanes end
# an epoch three times closer together than with a plain shuffle; a larger number makes orders less random.
LATEST_START = 2


class TokenDocuments(Protocol):
    """The interface of a corpus that a stream needs."""

    eos_token_id: int

    @property
    def fingerprint(self) -> str: ...
    def lengths(self, split: str) -> NDArray[np.int64]: ...
    def tokens(self, split: str, index: int) -> NDArray[Any]: ...


class LaneStream(SegmentStream):
    """An endless iterator of segments, in which each lane reads one document after another.

    A step is a tuple (tokens, targets, mask, starts, cursor). Segments are built ahead in a thread, which `close`, or
    leaving a with-block, ends.
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
        excerpt: int = 0,
        repeats: Repeats | None = None,
        prefetch: int = 2,
    ) -> None:
        """Open a stream.

        Args:
            corpus: the prepared documents.
            split: train, validation or test.
            lanes: the number of documents read in parallel, over all ranks.
            segment: tokens per lane and step.
            seed: of the order of documents.
            rank: which share of the lanes to return; the stream of all lanes is the same for any `world`.
            world: the number of ranks.
            one_pass: read each document once, then end.
            excerpt: read documents in shuffled pieces of this many tokens, each with an empty memory at its start; 0:
                whole documents. Lanes then change documents often: otherwise the weights learn what the documents
                being read repeat, and nothing is left for the memory to learn.
            repeats: plant repeats into some of the excerpts.
            prefetch: steps to build ahead.
        """
        _check_sizes(lanes, segment, seed, rank, world)
        if excerpt < 0 or excerpt % segment:
            raise DataError(f"excerpt is {excerpt}: it must be a multiple of the segment, {segment}, or 0")
        self._corpus = corpus
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
            "excerpt": excerpt,
            "repeats": list(repeats) if repeats else None,
        }
        self._ahead: Prefetcher[Segment] | None = None
        self._cursor = _cursor_of(self._new_schedule(), self._identity)

    def __next__(self) -> Segment:
        if self._ahead is None:
            segments = _segments(self._corpus, self._schedule_at(self._cursor), self._lanes, self._identity)
            self._ahead = Prefetcher(segments, self._prefetch)
        segment = next(self._ahead)
        assert segment.cursor is not None
        self._cursor = segment.cursor
        return segment

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def state_dict(self) -> Cursor:
        return self._cursor

    def load_state_dict(self, state: Cursor) -> None:
        """Restores the state of a stream with the same corpus, split, lanes, segment and seed; ranks may differ."""
        self._schedule_at(state)
        self.close()
        self._cursor = state

    def _new_schedule(self) -> LaneSchedule:
        who = self._identity
        excerpt = who["excerpt"] // self._segment
        repeats = Repeats(*who["repeats"]) if who["repeats"] else None
        return LaneSchedule(self._lengths, who["lanes"], self._segment, who["seed"], who["one_pass"], excerpt, repeats)

    def _schedule_at(self, state: Cursor) -> LaneSchedule:
        defaults = {"excerpt": 0, "repeats": None}  # states of 0.1.0 do not have them
        for key, here in self._identity.items():
            there = state.get(key, defaults.get(key)) if isinstance(state, dict) else None
            if there != here:
                raise DataError(
                    f"the stream state does not match: its {key} is {there!r}, but this stream's is {here!r}"
                )
        schedule = self._new_schedule()
        try:
            schedule.move_to(int(state["epoch"]), int(state["taken"]))
            schedule.positions = [position and Position(*map(int, position)) for position in state["places"]]
            lanes_agree = len(schedule.positions) == self._identity["lanes"]
            in_range = all(0 <= at.document < len(self._lengths) for at in schedule.positions if at) and all(
                0 <= at.segment <= schedule.last[at.document] for at in schedule.positions if at
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the stream state is damaged: {error!r}") from None
        if not (lanes_agree and in_range and 0 <= schedule.taken <= schedule.size):
            raise DataError("the stream state is damaged: it points outside the documents")
        return schedule


class Position(NamedTuple):
    """A segment of a document."""

    document: int
    segment: int
    planted: int = 0
    """Where repeats are planted into its excerpt: the seed of their places; else 0."""


class LaneSchedule:
    """Which lane reads which segment of which document at each step.

    Lanes take documents from one queue per epoch. A lane that has read its document to the end takes the next at the
    following step; when the queue is empty it takes from the next epoch's or, in a single pass, stays idle. Every rank
    simulates all lanes, so ranks agree without communication, and the schedule does not depend on their number.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        lanes: int,
        segment: int,
        seed: int,
        one_pass: bool,
        excerpt: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        # A document has one position more than tokens: the mark that ends it is predicted too.
        segments = -(-(lengths + 1) // segment)
        self.seed = seed
        self.one_pass = one_pass
        self.epoch = 0
        self.taken = 0  # documents (or excerpts) taken from this epoch's queue
        self.positions: list[Position | None] = [None] * lanes  # of each lane, next; None: it takes from the queue
        self.last = (segments - 1).tolist()  # segment of each document
        self.excerpt = excerpt or int(segments.max())  # segments
        self.repeats = repeats
        excerpts = -(-segments // self.excerpt)
        self._documents = np.repeat(np.arange(len(segments)), excerpts)
        self._firsts = (
            np.arange(len(self._documents)) - np.repeat(excerpts.cumsum() - excerpts, excerpts)
        ) * self.excerpt
        self._segments = np.minimum(segments[self._documents] - self._firsts, self.excerpt)
        self._queue = self._order(0)

    @property
    def size(self) -> int:
        """Documents, or excerpts, of an epoch."""
        return len(self._segments)

    def starts(self, position: Position | None) -> bool:
        """Whether a document or an excerpt begins here."""
        return position is not None and position.segment % self.excerpt == 0

    def next_step(self) -> list[Position | None]:
        """What each lane reads at this step (None: it is idle); advances by one step."""
        now = [position or self._take() for position in self.positions]
        self.positions = [self._after(position) for position in now]
        return now

    def _after(self, position: Position | None) -> Position | None:
        if position is None or position.segment == self.last[position.document]:
            return None
        after = position._replace(segment=position.segment + 1)
        return None if self.starts(after) else after

    def _take(self) -> Position | None:
        if self.taken == len(self._queue):
            if self.one_pass:
                return None
            self.move_to(self.epoch + 1, 0)
        self.taken += 1
        excerpt = self._queue[self.taken - 1]
        planted = self.repeats.plant(self.epoch * self.size + self.taken, self.seed) if self.repeats else 0
        return Position(int(self._documents[excerpt]), int(self._firsts[excerpt]), planted)

    def move_to(self, epoch: int, taken: int) -> None:
        """Moves to a position in an epoch's queue."""
        if epoch != self.epoch:
            self._queue = self._order(epoch)
        self.epoch, self.taken = epoch, taken

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.one_pass:
            # Longest first: a simple rule that lets the lanes of a pass end close together.
            return np.argsort(-self._segments, kind="stable")
        chance = np.random.Generator(np.random.PCG64([self.seed, epoch])).random(self.size)
        steps = self._segments.sum() / len(self.positions)
        latest = np.maximum(steps - LATEST_START * self._segments, 0)
        return np.lexsort((chance, np.minimum(chance * steps, latest)))


def _segments(corpus: TokenDocuments, schedule: LaneSchedule, lanes: range, identity: Cursor) -> Iterator[Segment]:
    # Not a method: the thread that runs this must not keep the stream alive.
    while any(positions := schedule.next_step()):
        mine = [positions[lane] for lane in lanes]
        starts = np.array([schedule.starts(position) for position in mine], np.bool_)
        yield _read(mine, starts, corpus, _cursor_of(schedule, identity), schedule)


def _read(
    positions: list[Position | None],
    starts: NDArray[np.bool_],
    corpus: TokenDocuments,
    cursor: Cursor,
    schedule: LaneSchedule,
) -> Segment:
    segment = cursor["segment"]
    shape = (len(positions), segment)
    inputs, targets = np.full(shape, corpus.eos_token_id), np.full(shape, corpus.eos_token_id)
    mask = np.zeros(shape, np.bool_)
    for lane, position in enumerate(positions):
        if position:
            text, begin = _text_at(position, corpus.tokens(cursor["split"], position.document), segment, schedule)
            ahead = text[begin : begin + segment]
            targets[lane, : len(ahead)] = ahead
            # One more than the remaining tokens if they end inside the segment: the mark is predicted too.
            mask[lane, : len(ahead) + 1] = True
            first = 1 if position.segment == 0 else 0
            behind = text[begin - 1 + first : begin + len(ahead)][: segment - first]
            inputs[lane, first : first + len(behind)] = behind
    return Segment(inputs, targets, mask, starts, cursor)


def _text_at(position: Position, text: NDArray[Any], segment: int, schedule: LaneSchedule) -> tuple[NDArray[Any], int]:
    """The tokens of a document, or of the excerpt and the token before it, and where the segment begins in them."""
    begin = position.segment * segment
    if not (position.planted and schedule.repeats):
        return text, begin
    first = begin - position.segment % schedule.excerpt * segment
    low = max(first - 1, 0)
    excerpt = text[low : first + schedule.excerpt * segment]
    return schedule.repeats.into(excerpt, first - low, position.planted), begin - low


def _cursor_of(schedule: LaneSchedule, identity: Cursor) -> Cursor:
    positions = [position and list(position) for position in schedule.positions]
    return {**identity, "epoch": schedule.epoch, "taken": schedule.taken, "places": positions}


def _check_sizes(lanes: int, segment: int, seed: int, rank: int, world: int) -> None:
    for name, value, least in (("lanes", lanes, 1), ("segment", segment, 1), ("world", world, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"{name} must be at least {least}, not {value}")
    if not 0 <= rank < world:
        raise DataError(f"rank must be 0 to {world - 1} in a world of {world}, not {rank}")
    if lanes % world:
        raise DataError(f"{lanes} lanes can't be divided among {world} processes: lanes must be a multiple of {world}")

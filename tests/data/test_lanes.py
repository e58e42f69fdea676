"""Lanes give every document back whole and once per epoch, for any mix of sizes, and go on exactly where they were."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent.data.streams.lanes import LaneSchedule, LaneStream
from block_recurrent.data.streams.segments import Segment
from block_recurrent.errors import DataError

MARK = 1000


class Texts:
    """Documents in memory; document i holds i * 50, i * 50 + 1, ... so that any token tells where it is from."""

    eos_token_id = MARK
    fingerprint = "texts"

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def lengths(self, split: str) -> np.ndarray:
        return np.array(self._lengths, np.int64)

    def tokens(self, split: str, index: int) -> np.ndarray:
        return (np.arange(self._lengths[index]) + index * 50).astype(np.uint16)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))  # lanes per rank, world, segment


def streams(texts: Texts, per_rank: int, world: int, segment: int, **options: Any) -> list[LaneStream]:
    lanes = per_rank * world
    return [LaneStream(texts, "train", lanes, segment, 3, rank, world, prefetch=0, **options) for rank in range(world)]


def all_lanes(steps: tuple[Segment, ...]) -> list[np.ndarray]:
    """One step of all ranks as one step of all lanes."""
    return [np.concatenate(parts) for parts in list(zip(*steps, strict=True))[:4]]


def read_documents(lane_steps: list[tuple[np.ndarray, ...]]) -> list[list[int]]:
    """The documents that one lane read, checking inputs, targets, mask and starts on the way."""
    documents: list[list[int]] = []
    expected_input = MARK
    for tokens, targets, mask, start in lane_steps:
        if start:
            documents.append([])
            expected_input = MARK
        used = int(mask.sum())
        assert mask[:used].all()
        assert (tokens[used:] == MARK).all()
        assert (targets[used:] == MARK).all()
        for token, target in zip(tokens[:used], targets[:used], strict=True):
            assert token == expected_input
            documents[-1].append(int(target))
            expected_input = target
    return documents


def identity_of(document: list[int], texts: Texts) -> int | None:
    """Which document this is, whole, with its mark; None if it is cut short."""
    if document[-1] != MARK:
        return None
    assert MARK not in document[:-1]
    if len(document) == 1:
        return texts._lengths.index(0)
    index = document[0] // 50
    assert document[:-1] == texts.tokens("train", index).tolist()
    return index


@given(lengths, sizes)
@settings(deadline=None, max_examples=150)
def test_a_pass_reads_every_document_once_and_all_ranks_make_as_many_steps(
    document_lengths: list[int], shape: tuple[int, int, int]
) -> None:
    texts = Texts(document_lengths)
    per_rank = [list(stream) for stream in streams(texts, *shape, one_pass=True)]
    assert len({len(steps) for steps in per_rank}) == 1
    steps = [all_lanes(ranks) for ranks in zip(*per_rank, strict=True)]
    read = []
    for lane in range(shape[0] * shape[1]):
        read += read_documents([tuple(part[lane] for part in step) for step in steps])
    found = sorted(str(document) for document in read)
    assert found == sorted(str([*texts.tokens("train", i).tolist(), MARK]) for i in range(len(document_lengths)))
    assert steps[-1][2].any(), "the pass ends with the last document, not later"


@given(lengths, sizes)
@settings(deadline=None, max_examples=150)
def test_each_epoch_reads_every_document_once(document_lengths: list[int], shape: tuple[int, int, int]) -> None:
    texts = Texts(document_lengths)
    lanes, epochs = shape[0] * shape[1], 3
    steps: list[list[np.ndarray]] = []
    taken: list[int] = []
    all_streams = streams(texts, *shape)
    # Long enough that all documents of three epochs have ended.
    while len(taken) < (epochs + 1) * len(document_lengths) + lanes:
        ranks = tuple(next(stream) for stream in all_streams)
        steps.append(all_lanes(ranks))
        assert len({json.dumps(step.cursor) for step in ranks}) == 1
        _, targets, mask, starts = steps[-1]
        assert mask[:, 0].all(), "a training lane never rests"
        for lane in np.flatnonzero(starts):
            taken.append(int(targets[lane, 0]))
    # A document's first target tells which it is; lanes take documents in the order of the queue.
    first_targets = sorted(MARK if length == 0 else index * 50 for index, length in enumerate(document_lengths))
    for epoch in range(epochs):
        begin = epoch * len(document_lengths)
        assert sorted(taken[begin : begin + len(document_lengths)]) == first_targets
    for lane in range(lanes):
        documents = read_documents([tuple(part[lane] for part in step) for step in steps])
        for document in documents[:-1]:
            assert identity_of(document, texts) is not None, "a document is read to its end before the next"


@given(lengths, sizes, st.integers(0, 30), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=150)
def test_resume_continues_the_same_stream_in_any_world(
    document_lengths: list[int], shape: tuple[int, int, int], at: int, other_world: int, one_pass: bool
) -> None:
    texts = Texts(document_lengths)
    per_rank, world, segment = shape[0] * other_world, shape[1], shape[2]
    ends = 25
    whole = [
        all_lanes(ranks)
        for ranks in itertools.islice(
            zip(*streams(texts, per_rank, world, segment, one_pass=one_pass), strict=True), ends
        )
    ]
    before = streams(texts, per_rank, world, segment, one_pass=one_pass)
    at = min(at, len(whole))
    for _ in range(at):
        steps = [next(stream) for stream in before]
    state = json.loads(json.dumps(before[0].state_dict()))
    assert at == 0 or state == steps[0].cursor
    after = streams(texts, per_rank * world // other_world, other_world, segment, one_pass=one_pass)
    for stream in after:
        stream.load_state_dict(state)
    rest = [all_lanes(ranks) for ranks in itertools.islice(zip(*after, strict=True), ends - at)]
    assert len(rest) == len(whole) - at
    for expected, actual in zip(whole[at:], rest, strict=True):
        for a, b in zip(expected, actual, strict=True):
            np.testing.assert_array_equal(a, b)


@given(lengths, sizes, st.integers(1, 3), st.integers(0, 20))
@settings(deadline=None, max_examples=100)
def test_excerpts_are_read_once_an_epoch_and_resume(
    document_lengths: list[int], shape: tuple[int, int, int], excerpt: int, at: int
) -> None:
    texts, segment = Texts(document_lengths), shape[2]
    length = excerpt * segment
    cut = [
        (index, begin) for index, n in enumerate(document_lengths) for begin in range(0, n + 1, length)
    ]  # every document has a mark after its last token
    all_streams = streams(texts, *shape, excerpt=length)
    whole: list[list[np.ndarray]] = []
    cursors, started = [all_streams[0].state_dict()], []
    while len(started) < len(cut):
        ranks = tuple(next(stream) for stream in all_streams)
        whole.append(all_lanes(ranks))
        cursors.append(ranks[0].cursor)
        tokens, targets, _, starts = whole[-1]
        for lane in np.flatnonzero(starts):
            started.append((int(tokens[lane, 0]), int(targets[lane, 0])))
    expected = []
    for index, begin in cut:
        text = [MARK, *texts.tokens("train", index).tolist(), MARK]
        expected.append((text[begin], text[begin + 1]))  # an excerpt starts with the token before it
    assert sorted(started[: len(cut)]) == sorted(expected)

    at = min(at, len(whole))
    for stream in all_streams:
        stream.load_state_dict(json.loads(json.dumps(cursors[at])))
    for step in whole[at:]:
        again = all_lanes(tuple(next(stream) for stream in all_streams))
        for a, b in zip(step, again, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_state_of_whole_documents_does_not_fit_excerpts_and_an_old_one_is_of_whole_documents() -> None:
    state = next(LaneStream(Texts([30, 7]), "train", 2, 4, prefetch=0)).cursor
    assert state is not None
    with pytest.raises(DataError, match="its excerpt is 0, but this stream's is 8"):
        LaneStream(Texts([30, 7]), "train", 2, 4, excerpt=8, prefetch=0).load_state_dict(state)
    old = {key: value for key, value in state.items() if key != "excerpt"}
    LaneStream(Texts([30, 7]), "train", 2, 4, prefetch=0).load_state_dict(old)
    with pytest.raises(DataError, match="multiple of the segment, 4"):
        LaneStream(Texts([30, 7]), "train", 2, 4, excerpt=6)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_state_is_that_of_the_used_step_not_of_the_prefetched(prefetch: int) -> None:
    texts = Texts([30, 7, 22])
    with LaneStream(texts, "train", 2, 4, prefetch=prefetch) as stream:
        for _ in range(5):
            used = next(stream)
        threading.Event().wait(0.05)  # time to run ahead
        assert stream.state_dict() == used.cursor
        following = [next(stream) for _ in range(4)]
    with LaneStream(texts, "train", 2, 4, prefetch=prefetch) as again:
        again.load_state_dict(used.cursor)
        for expected in following:
            np.testing.assert_array_equal(next(again).tokens, expected.tokens)


def test_closing_and_going_on_loses_nothing() -> None:
    texts = Texts([30, 7, 22])
    whole = list(itertools.islice(LaneStream(texts, "train", 2, 4, prefetch=0), 8))
    stream = LaneStream(texts, "train", 2, 4, prefetch=3)
    for expected in whole:
        np.testing.assert_array_equal(next(stream).targets, expected.targets)
        stream.close()


def test_orders_differ_between_epochs_and_seeds_and_repeat_with_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        schedule = LaneSchedule(np.full(40, 9), lanes=1, segment=10, seed=seed, one_pass=False)
        return [
            [position.document for position in (schedule.next_step()[0] for _ in range(40)) if position]
            for _ in range(3)
        ]

    one, two, three = orders(1)
    assert sorted(one) == sorted(two) == list(range(40))
    assert len({str(one), str(two), str(three), str(orders(2)[0])}) == 4
    assert orders(1) == [one, two, three]


def test_lanes_end_an_epoch_closer_together_than_with_a_plain_shuffle() -> None:
    document_lengths = np.random.default_rng(0).lognormal(8, 1.2, 400).astype(np.int64)
    lanes, segment = 8, 64
    needed = -(-(document_lengths + 1) // segment)

    def spread(order: np.ndarray) -> int:
        ends = [0] * lanes
        for document in order:
            ends[ends.index(min(ends))] += int(needed[document])
        return max(ends) - min(ends)

    ours, shuffled = [], []
    for seed in range(20):
        schedule = LaneSchedule(document_lengths, lanes, segment, seed, one_pass=False)
        ours.append(spread(schedule._queue))
        shuffled.append(spread(np.random.default_rng(seed).permutation(len(needed))))
    assert np.mean(ours) < np.mean(shuffled) / 3
    assert max(ours) < needed.max() / 2


def test_a_single_pass_takes_the_longest_documents_first() -> None:
    stream = LaneStream(Texts([5, 40, 10, 40]), "train", 2, 5, one_pass=True, prefetch=0)
    assert next(stream).targets[:, 0].tolist() == [50, 150]


def test_more_lanes_than_documents_in_a_pass_are_padding() -> None:
    steps = list(LaneStream(Texts([3]), "train", 4, 8, one_pass=True, prefetch=0))
    assert len(steps) == 1
    assert steps[0].mask.sum() == 4
    assert steps[0].starts.tolist() == [True, False, False, False]
    assert (steps[0].tokens[1:] == MARK).all()


def test_shapes_and_types() -> None:
    step = next(LaneStream(Texts([30, 7]), "train", 4, 6, rank=1, world=2, prefetch=0))
    assert step.tokens.shape == step.targets.shape == step.mask.shape == (2, 6)
    assert step.starts.shape == (2,)
    assert step.tokens.dtype == step.targets.dtype == np.int64
    assert step.mask.dtype == step.starts.dtype == np.bool_


def test_an_error_while_reading_reaches_the_reader() -> None:
    class Broken(Texts):
        def tokens(self, split: str, index: int) -> np.ndarray:
            raise OSError("the disk is gone")

    stream = LaneStream(Broken([5, 5]), "train", 1, 4)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(stream)


def test_a_forgotten_stream_ends_its_thread() -> None:
    before = set(threading.enumerate())
    stream = LaneStream(Texts([30, 7]), "train", 1, 4)
    next(stream)
    (thread,) = set(threading.enumerate()) - before
    del stream
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lanes": 6, "world": 4}, "6 lanes can't be divided among 4 processes: lanes must be a multiple of 4"),
        ({"lanes": 0}, "lanes must be at least 1, not 0"),
        ({"segment": 0}, "segment must be at least 1, not 0"),
        ({"rank": 2, "world": 2}, "rank must be 0 to 1 in a world of 2, not 2"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_bad_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LaneStream(Texts([5]), "train", **({"lanes": 4, "segment": 4} | arguments))


def test_an_empty_split() -> None:
    with pytest.raises(DataError, match="split 'validation' has no documents"):
        LaneStream(Texts([]), "validation", 1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 3}, "its lanes is 3, but this stream's is 2"),
        ({"seed": 9}, "its seed is 9, but this stream's is 0"),
        ({"corpus": "other"}, "its corpus is 'other'"),
        ({"places": [[7, 0], None]}, "points outside the documents"),
        ({"places": [[0, 99], None]}, "points outside the documents"),
        ({"places": [None]}, "points outside the documents"),
        ({"places": "nonsense"}, "damaged"),
        ({"taken": -1}, "points outside the documents"),
        ({"epoch": None}, "damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    stream = LaneStream(Texts([30, 7]), "train", 2, 4, prefetch=0)
    state = next(stream).cursor
    with pytest.raises(DataError, match=message):
        stream.load_state_dict(state | change)
    assert stream.state_dict() == state

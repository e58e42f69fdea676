"""Planted repeats: passages said again in training text."""

from __future__ import annotations

import numpy as np
import pytest

from block_recurrent.data import LaneStream
from block_recurrent.data.streams.repeats import Repeats

MARK = 50_000


class Counting:
    """Documents in which every token is another one, so that whatever comes twice was planted."""

    eos_token_id = MARK
    fingerprint = "counting"

    def lengths(self, split):
        return np.array([4000, 2500, 130])

    def tokens(self, split, index):
        return np.arange(self.lengths(split)[index]) + 10_000 * index


def stream(**options):
    return LaneStream(Counting(), "train", lanes=4, segment=64, seed=3, excerpt=512, prefetch=0, **options)


def lane_texts(segments):
    """What each lane read, excerpt by excerpt."""
    texts = []
    for lane in range(4):
        for segment in segments:
            if segment.starts[lane]:
                texts.append([])
            texts[-1].extend(segment.targets[lane][segment.mask[lane]].tolist())
    return [text for text in texts if len(text) > 64]


def test_repeats_are_at_all_distances_up_to_the_largest():
    planted = Repeats(1.0, 0, 200).into(np.arange(3000), 0, seed=5)
    assert len(planted) == 3000
    moved = np.flatnonzero(planted != np.arange(3000))
    distances = {int(at - planted[at]) for at in moved}  # a copy of a copy is further away than it was planted
    assert 0.3 < len(moved) / 3000 < 0.6
    assert min(distances) >= 8
    assert {8 <= d < 32 for d in distances} == {True, False}
    # A passage is said again whole: most tokens follow the one that they followed before.
    followed = planted[moved[1:]] - planted[moved[:-1]] == 1
    assert followed.mean() > 0.8


def test_a_share_of_the_excerpts_has_repeats_and_only_the_first_ones():
    segments = [next(s) for s in [stream(repeats=Repeats(0.5, 10, 128))] for _ in range(60)]
    repeated = [len(set(text)) < len(text) for text in lane_texts(segments)]
    assert 2 <= sum(repeated) <= 10
    everywhere = [next(s) for s in [stream(repeats=Repeats(1.0, 0, 128))] for _ in range(20)]
    assert all(len(set(text)) < len(text) for text in lane_texts(everywhere))


def test_inputs_are_the_targets_of_one_token_before():
    s = stream(repeats=Repeats(1.0, 0, 128))
    before = None
    for _ in range(12):
        segment = next(s)
        real = segment.mask[:, 1:]
        assert (segment.tokens[:, 1:][real] == segment.targets[:, :-1][real]).all()
        if before is not None:
            goes_on = ~segment.starts & before.mask[:, -1]
            assert (segment.tokens[goes_on, 0] == before.targets[goes_on, -1]).all()
        before = segment


def test_a_resumed_stream_plants_the_same():
    one, other = (stream(repeats=Repeats(0.5, 0, 128)) for _ in range(2))
    for _ in range(5):
        next(one)
    other.load_state_dict(one.state_dict())
    for _ in range(30):
        a, b = next(one), next(other)
        assert (a.tokens == b.tokens).all()
        assert (a.targets == b.targets).all()


def test_a_state_without_repeats_is_of_another_stream():
    from block_recurrent.errors import DataError

    plain = stream()
    next(plain)
    old = {key: value for key, value in plain.state_dict().items() if key != "repeats"}
    stream().load_state_dict(old)  # of an earlier version
    with pytest.raises(DataError, match="repeats"):
        stream(repeats=Repeats(0.5, 0, 128)).load_state_dict(old)

"""Planted names: documents in which a name is asked for again, near or far from where it was last said.

    xw tz?K vv uyt ... wt x?K zu ...

A document has one name, a capital letter that always follows a question mark; all else is noise. The first time, nobody
can know the name: it costs log2(names) bits, chance. Every later time it can be known, if it is remembered. The
distance of an asked name is counted in tokens from the last time it was said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from block_recurrent.errors import ConfigError

NAMES = b"ABCDEFGHIJKLMNOPQRS"
FILLER = b"tuvwxyz "
ASK = ord("?")
SPACE = ord(" ")
LATE_SHARE = 0.3
"""Of training documents: the name comes first after up to eight windows, instead of within one."""
MARK = 256
"""The document mark of the byte tokenizer."""


class AskedName(NamedTuple):
    """A place of a text where a name is asked for that was said before."""

    token: int
    """The number of the name's token, from 0."""
    distance: int


class Lesson(NamedTuple):
    """A training document, position by position: its mark comes first."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    asked: NDArray[np.bool_]
    """Where the name is the target."""
    distance: NDArray[np.int64]
    """Of these targets; 0: the name was not said before."""


@dataclass(frozen=True)
class PlantedNames:
    """The task, for models of one window."""

    window: int
    names: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.names <= len(NAMES):
            raise ConfigError(f"--names is {self.names}: it must be 2 to {len(NAMES)}")

    @property
    def chance(self) -> float:
        """Bits of a name that nobody can know."""
        return float(np.log2(self.names))

    def text(self, rng: np.random.Generator, distances: list[int]) -> tuple[str, list[AskedName]]:
        """A document to be measured on: the name, and then asked for again at these distances, one after the other."""
        name = NAMES[rng.integers(self.names)]
        last = 1 + int(rng.integers(self.window))
        mentions = [last]
        for distance in distances:
            mentions.append(mentions[-1] + distance)
        letters = self._noise(rng, mentions[-1] + 2)
        for index in mentions:
            letters[index - 1 : index + 2] = (ASK, name, SPACE)
        asked = [AskedName(index, distance) for index, distance in zip(mentions[1:], distances, strict=True)]
        return letters.tobytes().decode("ascii"), asked

    def lesson(self, rng: np.random.Generator, length: int, gap: float, say_again: float) -> Lesson:
        """A training document of `length` positions, with a question every `gap` tokens on average.

        A question's answer is the target, but with chance 1 - `say_again` it is not said: noise follows instead. So one
        document asks for its name at dozens of distances, none of which is shortened by the answers before. With every
        answer said, long distances would be rare, and nothing would be learned of them.
        """
        name = NAMES[rng.integers(self.names)]
        tokens = self._noise(rng, length).astype(np.int64)
        tokens[0] = MARK
        targets = np.append(tokens[1:], MARK)
        asked, distance = np.zeros(length, np.bool_), np.zeros(length, np.int64)
        last = None
        # Sometimes the name comes late: a model that was told nothing must learn to say so, and not to guess.
        late = rng.random() < LATE_SHARE
        at = 1 + int(rng.integers(min(length // 2, 8 * self.window) if late else self.window))
        while at + 2 < length:
            tokens[at] = targets[at - 1] = ASK
            targets[at], asked[at] = name, True
            distance[at] = 0 if last is None else at + 1 - last
            if last is None or rng.random() < say_again:
                tokens[at + 1], tokens[at + 2], targets[at + 1] = name, SPACE, SPACE
                last = at + 1
            at += 3 + int(rng.exponential(gap))
        return Lesson(tokens, targets, asked, distance)

    def _noise(self, rng: np.random.Generator, length: int) -> NDArray[np.uint8]:
        return rng.choice(np.frombuffer(FILLER, np.uint8), length)


def distance_buckets(window: int, longest: int) -> list[tuple[int, int]]:
    """Distances from just beyond the window to the longest, each bucket reaching twice as far as the one before."""
    buckets = []
    low = window + 1
    while low <= longest:
        buckets.append((low, min(2 * (low - 1), longest)))
        low = buckets[-1][1] + 1
    return buckets


class LessonStep(NamedTuple):
    """One segment of every lane."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    asked: NDArray[np.bool_]
    distance: NDArray[np.int64]
    starts: NDArray[np.bool_]


class LessonLanes:
    """Lanes of training documents without end; whole segments, so that there is no padding."""

    def __init__(self, task: PlantedNames, lanes: int, segment: int, gap: float, say_again: float, seed: int) -> None:
        self.task, self.segment, self.gap, self.say_again = task, segment, gap, say_again
        self._rng = np.random.default_rng(seed)
        self._open: list[tuple[Lesson, int] | None] = [None] * lanes

    def step(self, longest: int) -> LessonStep:
        """The next segment of every lane; documents that begin now are at most `longest` long."""
        rows = []
        for lane, reading in enumerate(self._open):
            lesson, begin = reading or (self._new_lesson(longest), 0)
            part = slice(begin, begin + self.segment)
            rows.append((*(column[part] for column in lesson), begin == 0))
            self._open[lane] = (lesson, part.stop) if part.stop < len(lesson.tokens) else None
        return LessonStep(*(np.array(column) for column in zip(*rows, strict=True)))

    def _new_lesson(self, longest: int) -> Lesson:
        # Lengths are spread evenly by their logarithm: short documents stay in the mix, and with them first mentions.
        segments = max(1, round(np.exp(self._rng.uniform(0, np.log(max(1, longest // self.segment))))))
        # In half of the documents no answer is said: what was said once must last.
        say_again = self.say_again if self._rng.random() < 0.5 else 0.0
        return self.task.lesson(self._rng, segments * self.segment, self.gap, say_again)

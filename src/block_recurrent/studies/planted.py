"""Planted names: documents in which a name is queried again, near or far from its last mention.

    xw tz?K vv uyt ... wt x?K zu ...

A document has one name, a capital letter that always follows a question mark; all else is noise. The first time, the
name can't be predicted: it costs log2(names) bits, chance. Every later time it can, if it is remembered. The
distance of a query is counted in tokens from the last mention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.tokenizers.base import ByteTokenizer
from block_recurrent.errors import ConfigError

NAMES = b"ABCDEFGHIJKLMNOPQRS"
FILLER = b"tuvwxyz "
ASK = ord("?")
SPACE = ord(" ")
LATE_SHARE = 0.3  # of training documents: the first mention is within eight windows, instead of one


class AskedName(NamedTuple):
    """A query for a name that was mentioned before."""

    token: int  # the number of the name's token, from 0
    distance: int


class Lesson(NamedTuple):
    """A training document, position by position: its mark comes first."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    mask: NDArray[np.bool_]  # contributes to the loss: the name, where it is the target, and some of the noise
    distance: NDArray[np.int64]  # of these targets; 0: the name was not mentioned before


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
        """Bits of an unpredictable name."""
        return float(np.log2(self.names))

    def text(self, rng: np.random.Generator, distances: list[int]) -> tuple[str, list[AskedName]]:
        """A document to measure on: the name, and then queries at these distances, in order."""
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

    def lesson(
        self, rng: np.random.Generator, length: int, gap: float, say_again: float, noise_share: float = 0.0
    ) -> Lesson:
        """A training document of `length` positions, with a question every `gap` tokens on average.

        The answer of a query is the target, but with probability 1 - `say_again` noise follows in its place. So one
        document queries its name at dozens of distances, none of which is shortened by earlier answers. If every
        answer appeared, long distances would be rare, and would not be learned.
        """
        name, mark = NAMES[rng.integers(self.names)], ByteTokenizer().eos_token_id
        tokens = self._noise(rng, length).astype(np.int64)
        tokens[0] = mark
        targets = np.append(tokens[1:], mark)
        mask, distance = rng.random(length) < noise_share, np.zeros(length, np.int64)
        last = None
        # Sometimes the name comes late: the model must learn to be uncertain before it.
        late = rng.random() < LATE_SHARE
        at = 1 + int(rng.integers(min(length // 2, 8 * self.window) if late else self.window))
        while at + 2 < length:
            tokens[at] = targets[at - 1] = ASK
            targets[at], mask[at] = name, True
            distance[at] = 0 if last is None else at + 1 - last
            if last is None or rng.random() < say_again:
                tokens[at + 1], tokens[at + 2], targets[at + 1] = name, SPACE, SPACE
                last = at + 1
            at += 3 + int(rng.exponential(gap))
        return Lesson(tokens, targets, mask, distance)

    def _noise(self, rng: np.random.Generator, length: int) -> NDArray[np.uint8]:
        return rng.choice(np.frombuffer(FILLER, np.uint8), length)


def distance_buckets(window: int, longest: int) -> list[tuple[int, int]]:
    """Buckets of distances from just beyond the window to the longest, each twice as far as the one before."""
    buckets = []
    low = window + 1
    while low <= longest:
        buckets.append((low, min(2 * (low - 1), longest)))
        low = buckets[-1][1] + 1
    return buckets

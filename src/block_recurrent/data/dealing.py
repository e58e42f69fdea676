"""Which lane reads which segment of which document at each step: a simulation in small integers.

Lanes take documents from one queue per epoch. A lane that has read its document to the end takes the next at the
following step; when the queue is empty it takes from the next epoch's, or, in a single pass, rests. Every rank
simulates all lanes, so ranks agree without talking, and the dealing does not depend on how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A document starts at the latest this many times its own length before the ideal end of an epoch. On books, lanes end
# an epoch three times closer together than with a plain shuffle; a larger number makes orders less random.
LATEST_START = 2


class Place(NamedTuple):
    """A segment of a document."""

    document: int
    segment: int


class Dealer:
    """Deals the documents of a split to lanes."""

    def __init__(self, lengths: NDArray[np.int64], lanes: int, segment: int, seed: int, one_pass: bool) -> None:
        # A document has one position more than tokens: the mark that ends it is predicted too.
        self.segments = -(-(lengths + 1) // segment)
        self.seed = seed
        self.one_pass = one_pass
        self.epoch = 0
        self.taken = 0  # documents taken from this epoch's queue
        self.places: list[Place | None] = [None] * lanes  # what each lane reads next; None: it takes from the queue
        self._last = (self.segments - 1).tolist()
        self._queue = self._order(0)

    def deal(self) -> list[Place | None]:
        """What each lane reads at this step (None: it rests), and moves on."""
        now = [place or self._take() for place in self.places]
        self.places = [self._after(place) for place in now]
        return now

    def _after(self, place: Place | None) -> Place | None:
        if place is None or place.segment == self._last[place.document]:
            return None
        return Place(place.document, place.segment + 1)

    def _take(self) -> Place | None:
        if self.taken == len(self._queue):
            if self.one_pass:
                return None
            self.move_to(self.epoch + 1, 0)
        self.taken += 1
        return Place(int(self._queue[self.taken - 1]), 0)

    def move_to(self, epoch: int, taken: int) -> None:
        """Goes to a place of an epoch's queue."""
        if epoch != self.epoch:
            self._queue = self._order(epoch)
        self.epoch, self.taken = epoch, taken

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.one_pass:
            # Longest first: the lanes of a pass end as close together as a simple rule can bring them.
            return np.argsort(-self.segments, kind="stable")
        chance = np.random.Generator(np.random.PCG64([self.seed, epoch])).random(len(self.segments))
        steps = self.segments.sum() / len(self.places)
        latest = np.maximum(steps - LATEST_START * self.segments, 0)
        return np.lexsort((chance, np.minimum(chance * steps, latest)))

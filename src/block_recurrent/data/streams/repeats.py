"""Repeats planted into training text: passages that occur again, at distances that only a memory reaches.

Text repeats itself everywhere, but each repetition is a small part of the loss, and a small model learns
its memory last. A passage that comes again word for word is worth several bits per token to a model that remembers it,
so that memory is learned first (docs/evidence.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GAP = (4, 24)  # tokens of text between two repeats, from and below
LENGTH = (8, 24)  # tokens of a repeat


class Repeats(NamedTuple):
    """Which of the excerpts that lanes take get repeats, and how far back these reach."""

    share: float  # of the excerpts
    excerpts: int  # only this many of the first ones that lanes take; 0: all
    distance: int  # the largest; distances are spread evenly in their logarithm

    def plant(self, number: int, seed: int) -> int:
        """For the excerpt that is taken as number 1, 2, ...: a seed for `into`, or 0 if it stays as it is."""
        if self.excerpts and number > self.excerpts:
            return 0
        chosen = np.random.Generator(np.random.PCG64([seed, number])).random() < self.share
        return number if chosen else 0

    def into(self, text: NDArray[Any], begin: int, seed: int) -> NDArray[Any]:
        """A copy of the text, with repeats in its tokens from `begin` on."""
        text = np.array(text)
        random = np.random.Generator(np.random.PCG64(seed))
        most = len(text) // GAP[0] + 1
        gaps, lengths = (random.integers(*bounds, size=most).tolist() for bounds in (GAP, LENGTH))
        shares = random.random(most).tolist()
        at = begin
        for gap, length, share in zip(gaps, lengths, shares, strict=True):
            at += gap
            back = int(length * ((max(self.distance, length) + 1) / length) ** share)
            if at + length <= len(text) and back <= at - begin:
                text[at : at + length] = text[at - back : at - back + length]
                at += length
        return text

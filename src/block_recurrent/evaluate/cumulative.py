"""Cumulative cross-entropy by position: the paper's token-level figure.

At position x: the mean bits per token over the first x tokens of every document that is at least x long, with the
number of such documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXACT_POSITIONS = 4096  # up to here the curve has every position
GRID_POSITIONS = 2048  # number of positions beyond: a curve of 200,000 points would not show more


@dataclass(frozen=True)
class Curve:
    """The curve at some positions, counted from 1."""

    positions: NDArray[np.int64]
    bits_per_token: NDArray[np.float64]
    documents: NDArray[np.int64]

    def to_dict(self) -> dict[str, Any]:
        return {
            "positions": self.positions.tolist(),
            "bits_per_token": [round(x, 6) for x in self.bits_per_token.tolist()],
            "documents": self.documents.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Curve:
        """The inverse of `to_dict`."""
        return cls(
            np.array(values["positions"], np.int64),
            np.array(values["bits_per_token"], np.float64),
            np.array(values["documents"], np.int64),
        )


class CumulativeCurve:
    """Accumulates losses, keeping one number per grid position and per document."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.positions = grid_of(lengths)
        self._totals = np.zeros(len(self.positions))
        self._documents = np.zeros(len(self.positions), np.int64)
        self._running = np.zeros(len(lengths))

    def add(self, document: int, start: int, bits: NDArray[np.float64]) -> None:
        """Bits of consecutive tokens of a document, the first of them at index `start`; in order for each document."""
        upto = self._running[document] + np.cumsum(bits)
        first, last = np.searchsorted(self.positions, (start + 1, start + len(bits) + 1))
        inside = slice(first, last)
        self._totals[inside] += upto[self.positions[inside] - start - 1]
        self._documents[inside] += 1
        self._running[document] = upto[-1]

    def curve(self) -> Curve:
        """The curve of everything added so far."""
        reached = self._documents > 0
        positions, documents = self.positions[reached], self._documents[reached]
        return Curve(positions, self._totals[reached] / (positions * documents), documents)


def curve_of(bits: Sequence[NDArray[np.float32]]) -> Curve:
    """The curve of whole documents."""
    curve = CumulativeCurve(np.array(list(map(len, bits)), np.int64))
    for document, values in enumerate(bits):
        if len(values):
            curve.add(document, 0, values.astype(np.float64))
    return curve.curve()


def grid_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every position up to 4096, then evenly spaced ones, and the end of every document, where the mean may jump."""
    longest = int(lengths.max(initial=0))
    exact = np.arange(1, min(longest, EXACT_POSITIONS) + 1)
    if longest <= EXACT_POSITIONS:
        return exact
    spaced = np.linspace(EXACT_POSITIONS, longest, GRID_POSITIONS).astype(np.int64)
    ends = lengths if len(lengths) <= GRID_POSITIONS else lengths[:0]
    return np.unique(np.concatenate([exact, spaced, ends[ends > 0]]))

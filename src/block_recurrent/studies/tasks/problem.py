"""The interface of memory tasks: examples with answers, generated from a seed.

tokens    x1 x2 x3 |  y1 y2
targets    .  .  . y1 y2 y3      only answers contribute to the loss and are measured
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Example(NamedTuple):
    """One document, position by position."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]  # 0 where there is no answer
    mask: NDArray[np.bool_]  # where an answer is the target


class Problem(ABC):
    """A task. Its examples have a level, such as their length or the number of pairs: the higher, the harder."""

    @property
    @abstractmethod
    def symbols(self) -> int:
        """Size of the vocabulary, without the document mark."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of guessing with knowledge of the rules, but not of the example."""

    @abstractmethod
    def length(self, level: int) -> int:
        """Tokens of an example."""

    @abstractmethod
    def example(self, rng: np.random.Generator, level: int) -> Example:
        """An example, determined by the random numbers."""

    def for_tests(self) -> Problem:
        """The problem to measure accuracy on, if training mixes what tests separate."""
        return self


def ask(tokens: NDArray[np.int64], first: int, answers: NDArray[np.int64]) -> Example:
    """An example whose answers are the targets from position `first` on."""
    places = first + np.arange(len(answers))
    return ask_at(tokens, places, answers)


def ask_at(tokens: NDArray[np.int64], places: NDArray[np.int64], answers: NDArray[np.int64]) -> Example:
    """An example whose answers are the targets at these positions."""
    targets, mask = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), bool)
    targets[places], mask[places] = answers, True
    return Example(tokens.astype(np.int64), targets, mask)


def batch_of(problem: Problem, rng: np.random.Generator, level: int, lanes: int, length: int, pad: int) -> Example:
    """Examples of one level, a row each, filled up with `pad` to `length`."""
    examples = [problem.example(rng, level) for _ in range(lanes)]
    tokens, targets, mask = (np.stack(column) for column in zip(*examples, strict=True))
    fill = ((0, 0), (0, length - tokens.shape[1]))
    return Example(np.pad(tokens, fill, constant_values=pad), np.pad(targets, fill), np.pad(mask, fill))

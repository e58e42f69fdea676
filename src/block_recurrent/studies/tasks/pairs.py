"""Key-value pairs: one query, many queries, and the capacity of a state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from block_recurrent.studies.tasks.problem import Example, Problem, ask, ask_at


def _told(names: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """`n1 v1 n2 v2 ...`"""
    return np.stack([names, values], 1).ravel()


@dataclass(frozen=True)
class _Pairs(Problem):
    """Different names, each with any value, and one extra symbol as separator and filler."""

    names: int
    values: int

    @property
    def symbols(self) -> int:
        return self.names + self.values + 1

    @property
    def chance(self) -> float:
        return 1 / self.values

    def pairs(self, rng: np.random.Generator, level: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        names: NDArray[np.int64] = rng.choice(self.names, level, replace=False)
        values = self.names + rng.integers(self.values, size=level)
        return names, values


@dataclass(frozen=True)
class Retrieval(_Pairs):
    """`n1 v1 .. nk vk ? ni` -> vi, the associative retrieval of the Recurrent Memory Transformer. The level is k."""

    names: int = 10
    values: int = 10
    away: int = 0  # number of additional question marks between the pairs and the question

    def length(self, level: int) -> int:
        return 2 * level + 2 + self.away

    def example(self, rng: np.random.Generator, level: int) -> Example:
        names, values = self.pairs(rng, level)
        chosen = rng.integers(level)
        marks = np.full(1 + self.away, self.symbols - 1)
        tokens = np.concatenate([_told(names, values), marks, names[[chosen]]])
        return ask(tokens, len(tokens) - 1, values[[chosen]])


@dataclass(frozen=True)
class MQAR(Problem):
    """Multi-query associative recall (Arora et al. 2023): pairs, then their names again among other tokens.

    The level is the number of pairs; an example has `tokens_per_pair` tokens for each. Every name is repeated once, the
    sooner the more likely (gaps by a power law, as published), and is followed by its value. All else is random.
    """

    vocabulary: int = 8192  # half of it names, half of it values
    tokens_per_pair: int = 8
    away: int = 0  # tokens between the pairs and the first question
    power: float = 0.01

    @property
    def symbols(self) -> int:
        return self.vocabulary

    @property
    def chance(self) -> float:
        return 2 / self.vocabulary

    def length(self, level: int) -> int:
        return self.away + self.tokens_per_pair * level

    def example(self, rng: np.random.Generator, level: int) -> Example:
        half = self.vocabulary // 2
        names = rng.choice(half, level, replace=False)
        values = half + rng.integers(half, size=level)
        tokens = rng.integers(self.vocabulary, size=self.length(level))
        tokens[: 2 * level] = _told(names, values)
        # Questions are at even positions, so that each has room for its answer.
        first = 2 * level + self.away
        slots = (len(tokens) - first) // 2
        likely = self.power * np.arange(1, slots + 1) ** (self.power - 1)
        places = first + 2 * rng.choice(slots, level, replace=False, p=likely / likely.sum())
        tokens[places], tokens[places + 1] = names, values
        return ask_at(tokens, places, values)


@dataclass(frozen=True)
class Names(_Pairs):
    """Recall by number of names: pairs, `away` tokens of noise, and then every name in another order.

    The level is the number of pairs. Values after a name do not help with others, so the accuracy times the level is
    about the number of pairs that were remembered.
    """

    names: int = 32
    values: int = 16
    away: int = 16

    def length(self, level: int) -> int:
        return 4 * level + self.away

    def example(self, rng: np.random.Generator, level: int) -> Example:
        names, values = self.pairs(rng, level)
        order = rng.permutation(level)
        noise = np.full(self.away, self.symbols - 1)
        tokens = np.concatenate([_told(names, values), noise, _told(names[order], values[order])])
        first = 2 * level + self.away
        return ask_at(tokens, first + 2 * np.arange(level), values[order])

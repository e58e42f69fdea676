"""Copying: a whole sequence, its reverse, or only what is not noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from block_recurrent.studies.tasks.problem import Example, Problem, ask


@dataclass(frozen=True)
class Copy(Problem):
    """`x1 .. xn |` and then the sequence, `times` times over. The level is n.

    As in the Recurrent Memory Transformer (Bulatov et al. 2022): a copy of 24 is 24 + 2 x 24 = 9 segments of 8.
    """

    alphabet: int = 10
    times: int = 2
    backwards: bool = False  # the sequence in reverse order
    away: int = 0  # more bars between the sequence and the answer

    @property
    def symbols(self) -> int:
        return self.alphabet + 1

    @property
    def chance(self) -> float:
        return 1 / self.alphabet

    def length(self, level: int) -> int:
        return level * (1 + self.times) + self.away

    def example(self, rng: np.random.Generator, level: int) -> Example:
        sequence = rng.integers(self.alphabet, size=level)
        answers = np.tile(sequence[::-1] if self.backwards else sequence, self.times)
        bars = np.full(1 + self.away, self.alphabet)
        return ask(np.concatenate([sequence, bars, answers[:-1]]), level + self.away, answers)


@dataclass(frozen=True)
class SelectiveCopying(Problem):
    """A few symbols scattered in noise, then as many blanks: repeat them in order. The level is their number.

    As in Mamba (Gu and Dao 2023): 16 symbols in 4096 tokens. Here noise is one symbol, and the first empty place is
    marked by another, which all of them are.
    """

    noise: int = 64  # tokens that the symbols are scattered in, the symbols included
    alphabet: int = 8
    away: int = 0  # number of tokens at the end of these without symbols

    @property
    def symbols(self) -> int:
        return self.alphabet + 2

    @property
    def chance(self) -> float:
        return 1 / self.alphabet

    def length(self, level: int) -> int:
        return self.noise + level

    def example(self, rng: np.random.Generator, level: int) -> Example:
        blank, empty = self.alphabet, self.alphabet + 1
        tokens = np.full(self.length(level), blank)
        tokens[self.noise :] = empty
        symbols = rng.integers(self.alphabet, size=level)
        tokens[np.sort(rng.choice(self.noise - self.away, level, replace=False))] = symbols
        return ask(tokens, self.noise, symbols)

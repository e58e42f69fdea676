"""Regular languages: the state of a finite automaton after a string (Deletang et al. 2022).

| language | symbols | the answer |
| --- | --- | --- |
| parity | a b | whether the number of b is odd |
| even-pairs | a b | whether the number of ab and ba is odd, that is, whether first and last differ |
| cycle-navigation | stay, +1, -1 | the place on a cycle of five |
| modular-arithmetic | 0 to 4, + - x | the value modulo 5, from left to right |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.studies.tasks.problem import Example, Problem, ask

CYCLE = 5
PLUS, MINUS, TIMES = 5, 6, 7
LANGUAGES = {"parity": (2, 2), "even-pairs": (2, 2), "cycle-navigation": (3, CYCLE), "modular-arithmetic": (8, CYCLE)}
"""By name: symbols, and answers."""


@dataclass(frozen=True)
class Language(Problem):
    """A string of the level's length, `=`, and one answer. Arithmetic takes the next odd length: number, sign, ..."""

    name: str = "parity"
    mixed: bool = True  # strings of any length up to the level's, as in training; otherwise of exactly this length
    away: int = 0  # number of additional `=` before the answer

    def __post_init__(self) -> None:
        if self.name not in LANGUAGES:
            raise ConfigError(f"there is no language '{self.name}'{did_you_mean(self.name, LANGUAGES)}")

    @property
    def symbols(self) -> int:
        """Symbols of strings, the answers, and `=`."""
        return sum(LANGUAGES[self.name]) + 1

    @property
    def chance(self) -> float:
        return 1 / LANGUAGES[self.name][1]

    def length(self, level: int) -> int:
        return (level | 1 if self.name == "modular-arithmetic" else level) + 1 + self.away

    def for_tests(self) -> Language:
        return replace(self, mixed=False)

    def example(self, rng: np.random.Generator, level: int) -> Example:
        symbols, answers = LANGUAGES[self.name]
        length = self.length(int(rng.integers(1, level + 1)) if self.mixed else level) - 1 - self.away
        if self.name == "modular-arithmetic":
            string = rng.integers(PLUS, PLUS + 3, size=length)
            string[::2] = rng.integers(CYCLE, size=(length + 1) // 2)
        else:
            string = rng.integers(symbols, size=length)
        answer = symbols + self.answer(string)
        tokens = np.full(self.length(level), symbols + answers)  # tokens after the question have no effect
        tokens[:length] = string
        return ask(tokens, length + self.away, np.array([answer]))

    def answer(self, string: NDArray[np.int64]) -> int:
        """Which of the answers is right, from 0."""
        if self.name == "parity":
            return int(string.sum() % 2)
        if self.name == "even-pairs":
            return int(string[0] != string[-1])
        if self.name == "cycle-navigation":
            return int(np.array([0, 1, -1])[string].sum() % CYCLE)
        value = int(string[0])
        for sign, number in zip(string[1::2].tolist(), string[2::2].tolist(), strict=True):
            value = {PLUS: value + number, MINUS: value - number, TIMES: value * number}[sign] % CYCLE
        return value

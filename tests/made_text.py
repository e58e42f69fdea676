"""Texts of made-up words, for tests that need some."""

from __future__ import annotations

import random


def make_text(rng: random.Random) -> str:
    syllables = [a + b for a in "bcdfglmnprst" for b in ("a", "e", "i", "o", "an", "er", "in")]
    return " ".join("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(1500)) + ".\n"

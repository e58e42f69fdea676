"""Counting white-space words (those of `str.split`) and characters in UTF-8 that comes in pieces, at memory speed."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.utf8 import last_character_end

BLOCK_BYTES = 1 << 16  # stays in the cache between the passes over it


class Counts(NamedTuple):
    """Characters and words of a text; whether it begins and ends inside a word, to join it with its neighbours."""

    characters: int
    words: int
    begins_inside: bool
    ends_inside: bool

    def then(self, other: Counts) -> Counts:
        """The counts of this text followed by another; a word that the border cuts in two is one word."""
        one_word = self.ends_inside and other.begins_inside
        return Counts(
            self.characters + other.characters,
            self.words + other.words - one_word,
            self.begins_inside if self.characters else other.begins_inside,
            other.ends_inside if other.characters else self.ends_inside,
        )


NOTHING = Counts(0, 0, False, False)


def count(piece: bytes) -> Counts:
    """Counts a piece of UTF-8 that begins and ends between characters."""
    blocks = []
    start = 0
    while start < len(piece):
        block = piece[start : start + BLOCK_BYTES]
        if len(piece) > start + BLOCK_BYTES:
            block = block[: last_character_end(block)]
        blocks.append(_count_block(block))
        start += len(block)
    return reduce(Counts.then, blocks, NOTHING)


def _count_block(block: bytes) -> Counts:
    raw = np.frombuffer(block, np.uint8)
    # Bytes 9-13 and 28-32; unsigned differences wrap round.
    space = (raw - np.uint8(9) < 5) | (raw - np.uint8(28) < 5)
    characters = len(raw)
    if not block.isascii():
        _mark_wide_spaces(raw, space)
        characters -= int(np.count_nonzero(raw.view(np.int8) < -64))  # all bytes of a character but its first
    # A word begins where white space, or nothing, is followed by something else.
    words = int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])
    return Counts(characters, words, not space[0], not space[-1])


def _mark_wide_spaces(raw: NDArray[np.uint8], space: NDArray[np.bool_]) -> None:
    """U+0085, U+00A0, U+1680, U+2000-200A, U+2028, U+2029, U+202F, U+205F, U+3000, by their UTF-8."""
    leads = np.flatnonzero(raw >= 0xC2)
    padded = np.concatenate([raw, np.zeros(2, np.uint8)])
    one, two, three = raw[leads], padded[leads + 1], padded[leads + 2]
    wide2 = (one == 0xC2) & ((two == 0x85) | (two == 0xA0))
    general = (one == 0xE2) & (two == 0x80) & ((three <= 0x8A) | np.isin(three, (0xA8, 0xA9, 0xAF)))
    wide3 = (
        general
        | ((one == 0xE1) & (two == 0x9A) & (three == 0x80))
        | ((one == 0xE2) & (two == 0x81) & (three == 0x9F))
        | ((one == 0xE3) & (two == 0x80) & (three == 0x80))
    )
    for shift, found in ((0, leads[wide2 | wide3]), (1, leads[wide2 | wide3]), (2, leads[wide3])):
        space[found + shift] = True

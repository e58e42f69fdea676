"""Counting white-space words (those of `str.split`) in UTF-8 that comes in pieces, at memory speed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 16  # stays in the cache between the passes over it
# White space beyond ASCII, by its UTF-8: U+0085, U+00A0, U+1680, U+2000-200A, U+2028, U+2029, U+202F, U+205F, U+3000.
TWO_BYTES = (0x85, 0xA0)


class Words(NamedTuple):
    """Words of a piece; whether its first and last characters belong to words, to join it with its neighbours."""

    number: int
    begins_inside: bool
    ends_inside: bool


def count_words(piece: bytes) -> Words:
    """The words of a non-empty piece of UTF-8 that begins and ends between characters."""
    space = _white_space(np.frombuffer(piece, np.uint8))
    if not piece.isascii():
        _mark_wide_spaces(np.frombuffer(piece, np.uint8), space)
    # A word begins where white space (or nothing) is followed by something else.
    begins = int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])
    return Words(begins, not space[0], not space[-1])


def _white_space(raw: NDArray[np.uint8]) -> NDArray[np.bool_]:
    space = np.empty(len(raw), np.bool_)
    for start in range(0, len(raw), BLOCK_BYTES):
        block = raw[start : start + BLOCK_BYTES]
        # Bytes 9-13 and 28-32; unsigned differences wrap round.
        np.logical_or(block - np.uint8(9) < 5, block - np.uint8(28) < 5, out=space[start : start + BLOCK_BYTES])
    return space


def _mark_wide_spaces(raw: NDArray[np.uint8], space: NDArray[np.bool_]) -> None:
    leads = np.flatnonzero(raw >= 0xC2)
    padded = np.concatenate([raw, np.zeros(2, np.uint8)])
    one, two, three = padded[leads], padded[leads + 1], padded[leads + 2]
    wide2 = (one == 0xC2) & np.isin(two, TWO_BYTES)
    low = (one == 0xE2) & (two == 0x80) & ((three <= 0x8A) | np.isin(three, (0xA8, 0xA9, 0xAF)))
    wide3 = (
        low
        | ((one == 0xE1) & (two == 0x9A) & (three == 0x80))
        | ((one == 0xE2) & (two == 0x81) & (three == 0x9F))
        | ((one == 0xE3) & (two == 0x80) & (three == 0x80))
    )
    for shift, found in ((0, leads[wide2 | wide3]), (1, leads[wide2 | wide3]), (2, leads[wide3])):
        space[found + shift] = True

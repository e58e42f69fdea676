"""UTF-8 as bytes: boundaries of characters, and counts of characters and words (as by `str.split`)."""

from __future__ import annotations

import re
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


def to_utf8(text: str) -> bytes:
    """UTF-8 of a string; half a surrogate pair, which has none, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def last_character_end(buffer: bytes) -> int:
    """The end of the last whole character in the front of a longer UTF-8 text."""
    end = len(buffer)
    for back in range(1, min(4, end) + 1):
        byte = buffer[end - back]
        if byte < 0x80:
            return end
        if byte >= 0xC0:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return end if length <= back else end - back
    return end


class Counts(NamedTuple):
    """Bytes, characters and words of a text; and whether it begins and ends inside a word, to merge counts."""

    bytes: int
    characters: int
    words: int
    begins_inside: bool
    ends_inside: bool

    def then(self, other: Counts) -> Counts:
        """The counts of this text followed by another; a word across the boundary is one word."""
        one_word = self.ends_inside and other.begins_inside
        return Counts(
            self.bytes + other.bytes,
            self.characters + other.characters,
            self.words + other.words - one_word,
            self.begins_inside if self.characters else other.begins_inside,
            other.ends_inside if other.characters else self.ends_inside,
        )


NOTHING = Counts(0, 0, 0, False, False)


class _Scratch(threading.local):
    """Working memory of a thread. Allocating it for each piece would cost more than the counting."""

    def __init__(self) -> None:
        self.numbers = np.empty(0, np.uint8)
        self.flags = np.empty((2, 0), np.bool_)

    def of(self, size: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
        if size > len(self.numbers):
            self.numbers, self.flags = np.empty(size, np.uint8), np.empty((2, size), np.bool_)
        return self.numbers[:size], self.flags[0, :size], self.flags[1, :size]


_scratch = _Scratch()


def count(piece: bytes) -> Counts:
    """Counts a piece of UTF-8 that begins and ends between characters."""
    if not piece:
        return NOTHING
    # Few, long steps: each releases the GIL, and reacquiring it often would stop other threads.
    raw = np.frombuffer(piece, np.uint8)
    shifted, space, other = _scratch.of(len(raw))
    # Bytes 9-13 and 28-32; unsigned differences wrap around.
    np.less(np.subtract(raw, 9, out=shifted), 5, out=space)
    np.less(np.subtract(raw, 28, out=shifted), 5, out=other)
    np.logical_or(space, other, out=space)
    characters = len(raw)
    if not piece.isascii():
        wide = np.flatnonzero(np.greater_equal(raw, 0x80, out=other))
        leads = wide[raw[wide] >= 0xC0]
        characters -= len(wide) - len(leads)
        _mark_wide_spaces(raw, leads, space)
    # A word begins where white space, or nothing, is followed by something else.
    begins = np.greater(space[:-1], space[1:], out=other[:-1])
    return Counts(len(raw), characters, int(np.count_nonzero(begins)) + (not space[0]), not space[0], not space[-1])


def _mark_wide_spaces(raw: NDArray[np.uint8], leads: NDArray[np.intp], space: NDArray[np.bool_]) -> None:
    """U+0085, U+00A0, U+1680, U+2000-200A, U+2028, U+2029, U+202F, U+205F, U+3000, by their UTF-8."""
    one, two = raw[leads], raw[leads + 1]  # a piece ends between characters, so there is a second byte
    space[_all_bytes(leads[(one == 0xC2) & ((two == 0x85) | (two == 0xA0))], 2)] = True
    # Of three bytes: their first two say E1 9A, E2 80, E2 81 or E3 80, which is rare except for quotation marks.
    pair = (one - np.uint8(0xE1) < 3) & ((two == 0x80) | (two == 0x81) | (two == 0x9A))
    if pair.any():
        leads, one, two = leads[pair], one[pair], two[pair]
        three = raw[leads + 2]
        general = (one == 0xE2) & (two == 0x80)
        general &= (three <= 0x8A) | (three == 0xA8) | (three == 0xA9) | (three == 0xAF)
        others = ((one == 0xE1) & (two == 0x9A) & (three == 0x80)) | ((one == 0xE3) & (two == 0x80) & (three == 0x80))
        others |= (one == 0xE2) & (two == 0x81) & (three == 0x9F)
        space[_all_bytes(leads[general | others], 3)] = True


def _all_bytes(first: NDArray[np.intp], length: int) -> NDArray[np.intp]:
    """The positions of all bytes of characters of some length that begin at these."""
    return (first[:, None] + np.arange(length)).ravel()

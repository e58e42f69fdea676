"""Tokens as text: their positions, their words, and earlier mentions of the same word.

A word is a run of letters and digits. Mentions are compared without regard to case. The distance to the last earlier
mention is counted in tokens, from a token to the same position in the earlier word. A token outside words (white
space, punctuation) counts as a separate word.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data import Tokenizer

WORD = re.compile(r"[^\W_]+")
NEVER = -1

WORD_RULE = "a word is a run of letters and digits; mentions are compared without regard to case"
DISTANCE_RULE = "counted in tokens, from the token to the same position in the last earlier mention of its word"
NAME_RULE = "a proper name is a capitalized word whose lowercase form does not occur in the same document"


class TokenText:
    """One document, token by token, as text."""

    def __init__(self, tokens: NDArray[Any], tokenizer: Tokenizer) -> None:
        self.tokens = np.asarray(tokens)
        pieces = self._pieces(tokenizer)
        self.raw = b"".join(pieces)
        self.starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        """Where each token begins in the UTF-8, and the end of the last."""

    def __len__(self) -> int:
        return len(self.tokens)

    def _pieces(self, tokenizer: Tokenizer) -> list[bytes]:
        surfaces = {int(t): tokenizer.decode_bytes([int(t)], begin=False) for t in np.unique(self.tokens)}
        pieces = [surfaces[t] for t in self.tokens.tolist()]
        if pieces:
            pieces[0] = tokenizer.decode_bytes([int(self.tokens[0])], begin=True)
        return pieces

    @cached_property
    def text(self) -> str:
        """The document; bytes that are not UTF-8 become surrogates, one each."""
        return self.raw.decode("utf-8", "surrogateescape")

    @cached_property
    def _character_starts(self) -> NDArray[np.int64]:
        """Where each character begins in the UTF-8, and the end."""
        raw = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), "<u4")
        escaped = (raw >= 0xDC80) & (raw <= 0xDCFF)
        sizes = 1 + (raw >= 0x80).astype(np.int64) + (raw >= 0x800) + (raw >= 0x10000)
        return np.concatenate([[0], np.cumsum(np.where(escaped, 1, sizes))])

    @cached_property
    def word_spans(self) -> NDArray[np.int64]:
        """(words, 2): where each word begins and ends in the UTF-8."""
        spans = [found.span() for found in WORD.finditer(self.text)]
        return self._character_starts[np.array(spans, np.int64).reshape(-1, 2)]

    @cached_property
    def words(self) -> list[str]:
        return WORD.findall(self.text)

    @cached_property
    def word_of(self) -> NDArray[np.int64]:
        """For each token the number of the first word that it overlaps, or -1."""
        begins, ends = self.starts[:-1], self.starts[1:]
        if len(self.word_spans) == 0:
            return np.full(len(self), -1)
        first = np.searchsorted(self.word_spans[:, 1], begins, side="right")
        inside = np.minimum(first, len(self.word_spans) - 1)
        overlaps = (first < len(self.word_spans)) & (self.word_spans[inside, 0] < ends)
        return np.where(overlaps, inside, -1)

    @cached_property
    def distances(self) -> NDArray[np.int64]:
        """For each token the distance in tokens to the last earlier mention of its word; -1: none."""
        result = np.full(len(self), NEVER, np.int64)
        earlier_word = _previous([word.casefold() for word in self.words])
        in_word = np.flatnonzero(self.word_of >= 0)
        words = self.word_of[in_word]
        before = earlier_word[words]
        known = before >= 0
        in_word, words, before = in_word[known], words[known], before[known]
        # The same position in the earlier word; a token that begins with a space begins with the word.
        offset = np.maximum(self.starts[in_word] - self.word_spans[words, 0], 0)
        place = np.minimum(self.word_spans[before, 0] + offset, self.word_spans[before, 1] - 1)
        result[in_word] = in_word - (np.searchsorted(self.starts, place, side="right") - 1)
        others = np.flatnonzero(self.word_of < 0)
        same_token = _previous(self.tokens[others].tolist())
        seen = same_token >= 0
        result[others[seen]] = others[seen] - others[same_token[seen]]
        # A word that occurs twice inside one token ("haha" of "ha ha") is not an earlier mention.
        result[result == 0] = NEVER
        return result

    @cached_property
    def proper_names(self) -> NDArray[np.bool_]:
        """For each token whether its word is a proper name, by `NAME_RULE`."""
        written = set(self.words)
        is_name = np.array([w[0].isupper() and w.lower() not in written for w in self.words] + [False])
        return is_name[self.word_of]  # -1, no word, is the False at the end

    def word(self, index: int) -> str:
        """The word that a token is part of, or the token itself."""
        word = int(self.word_of[index])
        return self.words[word] if word >= 0 else self.token(index)

    def token(self, index: int) -> str:
        """A token as text."""
        return self.between(index, index + 1)

    def between(self, first: int, last: int) -> str:
        """The text of some tokens; incomplete characters become U+FFFD."""
        first, last = max(0, first), min(len(self), last)
        return self.raw[self.starts[first] : self.starts[last]].decode("utf-8", "replace")

    def excerpt(self, index: int, before_bytes: int = 160, after_bytes: int = 60) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it."""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        before = self.raw[max(0, begin - before_bytes) : begin].decode("utf-8", "ignore")
        after = self.raw[end : end + after_bytes].decode("utf-8", "ignore")
        return before, self.token(index), after

    def lengths_in_utf16(self) -> NDArray[np.int64]:
        """How many UTF-16 units of the text begin in each token, for positions in JavaScript."""
        characters = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), "<u4")
        units = np.concatenate([[0], np.cumsum(1 + (characters >= 0x10000))])
        first_character = np.searchsorted(self._character_starts, self.starts, side="left")
        return np.diff(units[first_character])


def _previous(keys: list[Any]) -> NDArray[np.int64]:
    """For each entry the index of the one before that is equal, or -1."""
    last: dict[Any, int] = {}
    result = np.full(len(keys), -1, np.int64)
    for index, key in enumerate(keys):
        result[index] = last.get(key, -1)
        last[key] = index
    return result

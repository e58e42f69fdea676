"""Turns tokens into text that can be shown immediately: whole characters, without stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from block_recurrent.data import Tokenizer
from block_recurrent.data.utf8 import last_character_end

TAIL_TOKENS = 4  # A character has at most four bytes, so an unfinished one lies within the last four tokens


class TextStream:
    """The text of one sequence while it is generated, token by token."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str]) -> None:
        """before: the last tokens before the generated ones; they may end inside a character."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._at_beginning = not before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(unfinished_character(tokenizer, before))
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is ready after this token; empty while a character or a possible stop string is unfinished."""
        raw = self._tokenizer.token_bytes(token, begin=self._at_beginning)
        self._at_beginning = False
        self._held += self._decoder.decode(raw)
        found = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found), forget=True)
        return self._release(len(self._held) - self._could_begin_stop())

    def finish(self) -> str:
        """Text held back because a stop string could have begun there. An unfinished character is dropped."""
        return self._release(len(self._held))

    def _could_begin_stop(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = 0
        for text in self._stop:
            for length in range(min(len(text) - 1, len(self._held)), longest, -1):
                if self._held.endswith(text[:length]):
                    longest = length
                    break
        return longest

    def _release(self, count: int, forget: bool = False) -> str:
        ready, rest = self._held[:count], self._held[count:]
        self._held = "" if forget else rest
        return ready


def unfinished_character(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """The bytes of an unfinished character at the end of these tokens; usually none."""
    tail = tokenizer.decode_bytes(list(tokens[-TAIL_TOKENS:]), begin=False)
    return tail[last_character_end(tail) :]

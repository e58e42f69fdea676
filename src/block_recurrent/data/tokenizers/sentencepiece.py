"""SentencePiece vocabularies: those of `brt tokenizer train`, and others."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from block_recurrent.data.tokenizers.base import Encoded, Tokenizer
from block_recurrent.data.utf8 import last_character_end

SPACE = "\u2581"  # how SentencePiece writes a space
UNKNOWN_SURFACE = " \u2047 ".encode()  # how SentencePiece decodes an unknown piece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece vocabulary."""

    # Short units are faster than long ones (the encoder sorts candidates of the whole string), down to about this.
    UNIT_CHARACTERS = 128

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.size = self._processor.get_piece_size()
        self._surfaces = [self._surface_of(index) for index in range(self.size)]
        # Most vocabularies put a space in front of every text. It represents the white space at a cut.
        self._prefixed = "".join(self._processor.encode("a", out_type=str)).startswith(SPACE)
        self._separators = self._find_separators()
        # The character before a cut must be one that no normalization removes or turns into a space.
        self._cut_place = re.compile(f"(?<=[\\w!-~])[{self._separators}](?=.)" if self._separators else "(?!)", re.S)
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._spells_space = not self._prefixed and all(map(self._processor.is_byte, self._space_ids))

    def _surface_of(self, index: int) -> bytes:
        piece: str = self._processor.id_to_piece(index)
        if self._processor.is_unknown(index):
            return UNKNOWN_SURFACE
        if self._processor.is_control(index):
            return b""
        if self._processor.is_byte(index):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def _find_separators(self) -> str:
        """The white space in front of which a cut changes nothing, as characters for a regular expression."""
        special = (self._processor.is_unknown, self._processor.is_control, self._processor.is_byte)
        words = [
            self._processor.id_to_piece(index)
            for index in range(self.size)
            if not any(is_special(index) for is_special in special)
        ]
        space = not any(re.search(f"[^{SPACE}]{SPACE}", word) for word in words)
        if self._processor.encode("a\nb") == self._processor.encode("a b"):
            newline = space
        else:
            newline = not self._prefixed and not any(re.search("[^\n]\n", word) for word in words)
        return (" " if space else "") + ("\n" if newline else "")

    def encode_piece(self, piece: bytes, begin: bool) -> Encoded:
        text = piece.decode("utf-8")
        body = text[1:] if self._prefixed and not begin and text[0] in self._separators else text
        ids = [token for unit in self._encode_units(list(self._units(body))) for token in unit]
        tokens = np.array(ids, dtype=self.dtype)
        back = self._join(ids, begin)
        exact = back == piece
        lost = 0 if exact else _characters_lost(text, back.decode("utf-8", "replace"))
        return Encoded(tokens, exact, lost, unknown=ids.count(self._processor.unk_id()))

    def _units(self, text: str) -> Iterator[str]:
        start = 0
        skip = 1 if self._prefixed else 0
        while found := self._cut_place.search(text, start + self.UNIT_CHARACTERS):
            yield text[start : found.start()]
            start = found.start() + skip
        yield text[start:]

    def _encode_units(self, units: list[str]) -> list[list[int]]:
        if self._spells_space and any(SPACE in unit for unit in units):
            return [self._encode_spelling_space(unit) for unit in units]
        return self._processor.encode(units, num_threads=1)

    def _encode_spelling_space(self, unit: str) -> list[int]:
        """SentencePiece can't tell U+2581 from a space; encoded as three single bytes it is restored."""
        first, *others = unit.split(SPACE)
        ids: list[int] = self._processor.encode(first)
        for part in others:
            ids += self._space_ids + self._processor.encode(part)
        return ids

    def safe_end(self, buffer: bytes) -> int:
        end = last_character_end(buffer)
        # Usually there is a place near the end; only if there is none, the whole buffer is searched.
        for start in (max(0, end - 4096), 0):
            tail = buffer[start:end].decode("utf-8", "ignore")
            places = [found.start() for found in self._cut_place.finditer(tail)]
            if places:
                return end - len(tail[places[-1] :].encode())
        return end

    def decode_bytes(self, tokens: ArrayLike, begin: bool = True) -> bytes:
        array = self.check(tokens)
        return self._join(array[array != self.eos_token_id].tolist(), begin)

    def _join(self, ids: list[int], begin: bool) -> bytes:
        joined = b"".join(map(self._surfaces.__getitem__, ids))
        return joined[1:] if begin and self._prefixed and ids and self._surfaces[ids[0]][:1] == b" " else joined


def _characters_lost(text: str, back: str) -> int:
    """How many characters occur less often in the decoded text, over all characters."""
    before = np.bincount(np.frombuffer(text.encode("utf-32-le"), "<u4"))
    after = np.bincount(np.frombuffer(back.encode("utf-32-le"), "<u4"), minlength=len(before))[: len(before)]
    return int(np.maximum(before - after, 0).sum())

"""A hash of all text that has come so far, as a value that can be saved and gone on from.

SHA-256 objects can't be saved, so this is a chain: the text is cut into pieces of 256 bytes, and each piece is hashed
together with the hash of all before. It depends on the text alone, not on how it came.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

PIECE_BYTES = 256


@dataclass(frozen=True)
class TextHash:
    """The hash of a text so far."""

    chain: bytes = b""
    tail: bytes = b""
    """What came after the last whole piece."""
    length: int = 0
    """Bytes of the text."""

    def update(self, data: bytes) -> TextHash:
        """The hash of the text with more behind it."""
        buffer, chain, start = self.tail + data, self.chain, 0
        while len(buffer) - start >= PIECE_BYTES:
            chain = hashlib.sha256(chain + buffer[start : start + PIECE_BYTES]).digest()
            start += PIECE_BYTES
        return TextHash(chain, buffer[start:], self.length + len(data))

    def hexdigest(self) -> str:
        """The hash as text."""
        return hashlib.sha256(self.chain + self.tail + self.length.to_bytes(8, "big")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file's header."""
        return {"chain": self.chain.hex(), "tail": self.tail.hex(), "length": self.length}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TextHash:
        """The inverse of `to_dict`."""
        return cls(bytes.fromhex(values["chain"]), bytes.fromhex(values["tail"]), int(values["length"]))

"""An incremental hash of text, as a value that can be saved and resumed.

SHA-256 objects can't be saved, so this is a chain: the text is cut into pieces of 256 bytes, and each piece is hashed
together with the hash of all before. It depends only on the text, not on how it was divided.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from block_recurrent.io.door import is_count

PIECE_BYTES = 256


@dataclass(frozen=True)
class TextHash:
    """The hash of a text so far."""

    chain: bytes = b""
    tail: bytes = b""  # text after the last whole piece
    length: int = 0  # bytes of the text

    def update(self, data: bytes) -> TextHash:
        """The hash after appending more text."""
        buffer, chain, start = self.tail + data, self.chain, 0
        while len(buffer) - start >= PIECE_BYTES:
            chain = hashlib.sha256(chain + buffer[start : start + PIECE_BYTES]).digest()
            start += PIECE_BYTES
        return TextHash(chain, buffer[start:], self.length + len(data))

    def hexdigest(self) -> str:
        """The hash as a hexadecimal string."""
        return hashlib.sha256(self.chain + self.tail + self.length.to_bytes(8, "big")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file's header."""
        return {"chain": self.chain.hex(), "tail": self.tail.hex(), "length": self.length}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TextHash:
        """The inverse of `to_dict`; a ValueError if no text has such a hash."""
        found = cls(bytes.fromhex(values["chain"]), bytes.fromhex(values["tail"]), values["length"])
        chain = hashlib.sha256().digest_size if is_count(found.length) and found.length >= PIECE_BYTES else 0
        if not is_count(found.length) or (len(found.chain), len(found.tail)) != (chain, found.length % PIECE_BYTES):
            raise ValueError("the hash of the text so far")
        return found

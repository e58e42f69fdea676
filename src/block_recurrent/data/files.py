"""Reading one text file in chunks of valid UTF-8, and deciding whether it is text at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from block_recurrent.data.utf8 import last_character_end
from block_recurrent.errors import DataError

CHUNK_BYTES = 1 << 21
# Of a file's first part: what no text has much of. Tab, line ends, form feed, backspace and escape do occur in text.
SAMPLE_BYTES = 1 << 13
ODD = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
ODD_SHARE, ODD_SHARE_WITH_NUL = 0.5, 0.1
SHORT = 64
REPLACEMENT = "\ufffd".encode()


class LeftOut(Exception):  # noqa: N818 - an outcome that is listed, not a failure
    """A document, or a part of one, that is not prepared, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass
class Remarks:
    """What reading a document found out beside its text."""

    strict: bool = False  # refuse what is not UTF-8
    replaced: int = 0
    nul: int = 0
    left_out: list[LeftOut] = field(default_factory=list)  # parts of the document

    def note(self, raw: bytes, replaced: int) -> None:
        self.replaced += replaced
        if 0 in raw:  # much faster than counting, and mostly there is none
            self.nul += raw.count(0)


def read_file(path: Path, name: str, remarks: Remarks) -> Iterator[bytes]:
    """The file's text as it is, in chunks of UTF-8 that end between characters."""
    rest = b""
    first = True
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                chunk = rest + chunk if rest else chunk
                end = last_character_end(chunk)
                rest, chunk = chunk[end:], chunk[:end]
                if first and _looks_binary(chunk or rest):
                    raise LeftOut(name, "is a binary file")
                first = False
                if chunk:
                    yield _valid(chunk, name, remarks)
    except OSError as error:
        raise LeftOut(name, reason_of(error)) from None
    if rest:
        yield _valid(rest, name, remarks)


def reason_of(error: OSError) -> str:
    """Why a file or folder can't be read."""
    return f"can't be read ({error.strerror or error})"


def _valid(chunk: bytes, name: str, remarks: Remarks) -> bytes:
    replaced = 0
    try:
        if not chunk.isascii():
            chunk.decode()
    except UnicodeDecodeError as error:
        if remarks.strict:
            raise DataError(
                f"'{name}' is not UTF-8 (byte 0x{chunk[error.start]:02X}); convert it, or leave --strict away"
            ) from None
        text = chunk.decode("utf-8", "replace").encode()
        replaced = text.count(REPLACEMENT) - chunk.count(REPLACEMENT)
        chunk = text
    remarks.note(chunk, replaced)
    return chunk


def _looks_binary(chunk: bytes) -> bool:
    sample = chunk[:SAMPLE_BYTES].decode("utf-8", "replace")
    odd = len(ODD.findall(sample)) / max(len(sample), 1)
    if "\0" in sample:
        return odd > ODD_SHARE_WITH_NUL
    return len(sample) >= SHORT and odd > ODD_SHARE

"""Tokenizes text that comes in pieces, with the same tokens as for the whole text.

A SentencePiece vocabulary encodes a word that is cut in two differently, so the end of each piece is held back
until white space follows. Bytes never need to be held back.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data import Tokenizer
from block_recurrent.data.utf8 import last_character_end
from block_recurrent.errors import DataError

FILE_BYTES = 1 << 16  # also how much Ctrl-C may lose of a reading


def settled(tokenizer: Tokenizer, buffer: bytes) -> int:
    """The number of bytes at the front of a text whose tokens don't depend on what follows."""
    if tokenizer.model is None:
        return len(buffer)
    end = 0
    # As the tokenizer cuts a long text; the only place that cuts where there is no white space.
    while len(buffer) - end > tokenizer.piece_bytes:
        end += tokenizer.safe_end(buffer[end : end + tokenizer.piece_bytes])
    last = end + tokenizer.safe_end(buffer[end:])
    nothing_settled = last == end + last_character_end(buffer[end:])
    return end if nothing_settled else last


def tokens_of(tokenizer: Tokenizer, text: bytes, at_beginning: bool) -> NDArray[np.int64]:
    """The tokens of a piece of UTF-8; `at_beginning`: whether it is the beginning of the document."""
    parts = [np.empty(0, np.int64)]
    for index, piece in enumerate(tokenizer.cut([text]) if text else ()):
        parts.append(tokenizer.encode_piece(piece, begin=at_beginning and index == 0).tokens.astype(np.int64))
    return np.concatenate(parts)


def read_text(path: str | Path) -> Iterator[str]:
    """The text of a UTF-8 file in pieces, so that a file of any size needs little memory. '-': standard input.

    What precedes an invalid byte is given before the error is raised.
    """
    decoder, position = codecs.getincrementaldecoder("utf-8")("strict"), 0
    if str(path) != "-" and Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise DataError(f"'{path}' can't be read: it is not a regular file; - is standard input")
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb") as file:
            is_last = False
            while not is_last:
                chunk = file.read(FILE_BYTES)
                if position == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise DataError(f"'{path}' is UTF-16, not UTF-8: convert it, for example with iconv -f utf-16")
                is_last, held = not chunk, len(decoder.getstate()[0])
                try:
                    text = decoder.decode(chunk, is_last)
                except UnicodeDecodeError as error:
                    if before := error.object[: error.start]:
                        yield before.decode()
                    raise DataError(
                        f"'{path}' is not UTF-8 (byte 0x{error.object[error.start]:02X} at offset "
                        f"{position - held + error.start:,}): convert it, for example with iconv -f latin1 -t utf-8"
                    ) from None
                if text:
                    yield text
                position += len(chunk)
    except OSError as error:
        raise DataError(f"'{path}' can't be read: {error.strerror or error}") from None


def check_text(path: str | Path) -> None:
    """Raise an error unless a file is UTF-8 and not empty: found before hours of reading, rather than after."""
    if not sum(map(len, read_text(path))):
        raise DataError(f"'{path}' is empty: there is nothing to read")

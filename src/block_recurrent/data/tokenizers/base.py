"""The tokenizer interface, and the tokenizer of bytes.

A text is encoded in pieces, so that memory is bounded and time is linear. Where a piece may end is up to the tokenizer
(`safe_end`): anywhere between characters for bytes; for SentencePiece in front of white space, where no entry
of its vocabulary can extend across, so that the pieces have the same tokens as the whole text.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from block_recurrent import models
from block_recurrent.data.utf8 import last_character_end, to_utf8
from block_recurrent.errors import CheckpointError, DataError
from block_recurrent.io.door import read_bytes, sha256_of
from block_recurrent.run_config import RunConfig, read_toml

BYTES = "bytes"


class Encoded(NamedTuple):
    """One piece of text as tokens, with the losses of decoding."""

    tokens: NDArray[np.unsignedinteger]
    exact: bool  # decoding restores the text, byte for byte
    lost: int  # characters of the text that decoding does not restore
    unknown: int  # tokens that are the unknown piece


class Tokenizer(ABC):
    """Text to tokens 0..size-1 and back. The document mark, `eos_token_id`, is never part of an encoded text."""

    size: int
    sha256: str
    model: bytes | None  # the vocabulary file, None for bytes
    piece_bytes = 1 << 18  # of text, in `cut`

    @property
    def eos_token_id(self) -> int:
        """The document mark: input before a document's first token, target after its last."""
        return self.size

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model: all pieces and the document mark."""
        return self.size + 1

    @property
    def dtype(self) -> np.dtype:
        """The narrowest of uint16 and uint32, little-endian, that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text, as `brt data prepare` stores them."""
        parts = [
            self.encode_piece(piece, begin=index == 0).tokens for index, piece in enumerate(self.cut([to_utf8(text)]))
        ]
        return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32, casting="unsafe")

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens; bytes that are not UTF-8 (an incomplete character) become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def cut(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Cuts UTF-8 that comes in chunks of any size into pieces for `encode_piece`.

        The cuts depend only on the text, not on the chunks, so a text always has the same encoding.
        """
        parts: list[bytes] = []
        size = 0
        for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size <= self.piece_bytes:
                continue
            buffer, start = b"".join(parts), 0
            while size - start > self.piece_bytes:
                end = start + self.safe_end(buffer[start : start + self.piece_bytes])
                yield buffer[start:end]
                start = end
            parts, size = [buffer[start:]], size - start
        if size:
            yield b"".join(parts)

    def check(self, tokens: ArrayLike) -> NDArray[np.integer]:
        """The tokens as an array, after checking that each is a valid id or the mark."""
        array = np.asarray(tokens)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"tokens must be a flat list of integers, not {array.dtype} of shape {array.shape}")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > self.eos_token_id:
            raise DataError(
                f"token {low if low < 0 else high} is out of range: ids of this tokenizer are 0 to {self.eos_token_id}"
            )
        return array

    def token_bytes(self, token: int, begin: bool) -> bytes:
        """`decode_bytes` of one token, remembered."""
        key = token, begin
        if key not in self._bytes_of:
            self._bytes_of[key] = self.decode_bytes([token], begin)
        return self._bytes_of[key]

    @cached_property
    def _bytes_of(self) -> dict[tuple[int, bool], bytes]:
        return {}

    @abstractmethod
    def encode_piece(self, piece: bytes, begin: bool) -> Encoded:
        """Tokens of a piece made by `cut`; `begin`: whether it is the first of its text. Thread-safe."""

    @abstractmethod
    def safe_end(self, buffer: bytes) -> int:
        """The end of a piece at the front of this buffer: the last position that doesn't change the tokens."""

    @abstractmethod
    def decode_bytes(self, tokens: ArrayLike, begin: bool = True) -> bytes:
        """The UTF-8 of tokens; `begin`: whether they are at the beginning of a text."""


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    size = 256
    sha256 = hashlib.sha256(BYTES.encode()).hexdigest()
    model = None
    # There is nothing to encode; with long pieces, threads compete less for the GIL.
    piece_bytes = 1 << 21

    def encode_piece(self, piece: bytes, begin: bool) -> Encoded:
        return Encoded(np.frombuffer(piece, np.uint8), exact=True, lost=0, unknown=0)

    def safe_end(self, buffer: bytes) -> int:
        return last_character_end(buffer)

    def decode_bytes(self, tokens: ArrayLike, begin: bool = True) -> bytes:
        array = self.check(tokens)
        return array[array != self.eos_token_id].astype(np.uint8).tobytes()


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, or that of a SentencePiece file, a run or a bundled model."""
    if str(name) == BYTES:
        return ByteTokenizer()
    path, folder = Path(name), models.locate(name)[0]
    if (config := folder / models.CONFIG).is_file():
        return tokenizer_of_run(folder, RunConfig.from_dict(read_toml(config, sealed=True)).data.tokenizer)
    return tokenizer_of_file(path)


def tokenizer_of_run(run: Path, sha256: str) -> Tokenizer:
    """The tokenizer of a run, if it has the hash that the configuration says; runs of 0.1.0 say none."""
    path = run / models.TOKENIZER
    found = sha256_of(path) if path.is_file() else ByteTokenizer.sha256
    if sha256 not in ("", found):
        raise CheckpointError(
            f"the tokenizer of '{run}' is damaged: {path.name} has SHA-256 {found[:12]}, the run was trained with "
            f"{sha256[:12]}; copy {path.name} again from the data it was trained on"
        )
    return tokenizer_of_file(path) if path.is_file() else ByteTokenizer()


def tokenizer_of_file(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece file."""
    try:
        model = read_bytes(path)
    except FileNotFoundError:
        raise DataError(
            f"tokenizer file '{path}' does not exist; give a SentencePiece file, 'bytes', or a model name "
            "(see 'brt models')"
        ) from None
    except OSError as error:
        raise DataError(f"can't read the tokenizer file '{path}': {error.strerror or error}") from None
    return tokenizer_from_model(model, str(path))


def tokenizer_from_model(model: bytes, origin: str) -> Tokenizer:
    """The tokenizer of a SentencePiece file's contents; `origin` names it in the error."""
    from block_recurrent.data.tokenizers.sentencepiece import SentencePieceTokenizer

    try:
        tokenizer = SentencePieceTokenizer(model) if model else None
    except (RuntimeError, OSError, ValueError):
        tokenizer = None
    if tokenizer is None or tokenizer.size == 0:
        raise DataError(f"'{origin}' is not a SentencePiece file; give one, or 'bytes'")
    return tokenizer

"""A prepared folder: memory-mapped tokens of whole documents, their index, and the tokenizer that made them.

manifest.json       format, tokenizer, totals per split, every document, what was skipped
train.bin ...       tokens of a split, document after document, no marks, little-endian uint16 or uint32
tokenizer.model     copy of the SentencePiece file (none for bytes)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data.sources.document import SPLITS
from block_recurrent.data.tokenizers.base import BYTES, ByteTokenizer, Tokenizer, tokenizer_from_model
from block_recurrent.errors import DataError, FileFormatError, did_you_mean
from block_recurrent.io import door
from block_recurrent.io.door import MANIFEST

FORMAT = "block-recurrent corpus"
VERSION = 2
TOKENIZER_FILE = "tokenizer.model"
DECODE_TOKENS = 1 << 18


def token_file(split: str) -> str:
    """The file of a split's tokens."""
    return f"{split}.bin"


OUR_FILES = {MANIFEST, TOKENIZER_FILE, *map(token_file, SPLITS)}
_COUNTS = ("offset", "tokens", "bytes", "words", "characters", "replaced", "nul", "lost", "unknown")
_DOCUMENT: dict[str, door.Rule] = {
    "name": door.is_text,
    "split": lambda split: split in SPLITS,
    "sha256": door.is_hash,
    "tokens_sha256": lambda digest: digest is None or door.is_hash(digest),
    "exact": lambda exact: isinstance(exact, bool),
    **dict.fromkeys(_COUNTS, door.is_count),
}
_RULES: dict[str, door.Rule] = {
    "tokenizer": lambda tokenizer: _is_tokenizer(tokenizer),
    "dtype": lambda dtype: dtype in ("uint16", "uint32"),
    "settings": lambda settings: isinstance(settings, dict),
    "splits": lambda splits: isinstance(splits, dict),
    "left_out": lambda left: isinstance(left, list),
    "packages?": lambda packages: isinstance(packages, list),
    "documents": lambda documents: isinstance(documents, list),
}


def _is_tokenizer(x: Any) -> bool:
    if not isinstance(x, dict) or not door.is_hash(x.get("sha256")):
        return False
    size, kind = x.get("size"), x.get("kind")
    return size == ByteTokenizer.size if kind == BYTES else kind == "sentencepiece" and door.is_count(size)


@dataclass(frozen=True)
class DocumentInfo:
    """The entry of a document in the manifest."""

    name: str
    split: str
    offset: int  # of its first token in the split's file, in tokens
    tokens: int
    bytes: int  # of the text as UTF-8
    words: int  # separated by white space
    characters: int
    sha256: str  # of the text as UTF-8
    tokens_sha256: str | None  # of the stored tokens; None for bytes, whose tokens are the text
    exact: bool  # decoding the tokens restores the text, byte for byte
    replaced: int  # places that were not UTF-8 and became U+FFFD
    nul: int  # NUL characters, which are kept
    lost: int  # characters that decoding does not restore
    unknown: int  # tokens that are the unknown piece


class Corpus:
    """A folder made by `brt data prepare`, opened for reading. Opening it checks the manifest and the sizes of files;
    the tokens of a document are checked against their hash when they are first read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        try:
            self._read_index()
        except FileFormatError as error:
            raise FileFormatError(f"'{self.folder}' is damaged: {error}; prepare the folder again") from None

    def _read_index(self) -> None:
        tokenizer = self.manifest["tokenizer"]
        self.eos_token_id = int(tokenizer["size"])  # the document mark
        self.vocab_size = self.eos_token_id + 1
        self.dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self.left_out: list[dict[str, str]] = self.manifest["left_out"]
        self._documents: dict[str, list[DocumentInfo]] = {split: [] for split in SPLITS}
        self._place: dict[str, tuple[str, int]] = {}
        self._whole: set[tuple[str, int]] = set()
        for entry in self.manifest["documents"]:
            door.check_schema(entry, _DOCUMENT, "a document of its manifest")
            document = DocumentInfo(**entry)
            of_split = self._documents[document.split]
            expected = of_split[-1].offset + of_split[-1].tokens if of_split else 0
            if document.offset != expected:
                raise FileFormatError(
                    f"'{document.name}' should begin at token {expected}, but begins at {document.offset}"
                )
            if document.name in self._place:
                raise FileFormatError(f"its manifest lists '{document.name}' twice")
            self._place[document.name] = (document.split, len(of_split))
            of_split.append(document)
        self._files = {split: self._map(split) for split in SPLITS}

    def _map(self, split: str) -> NDArray[np.unsignedinteger]:
        path = self.folder / token_file(split)
        documents = self._documents[split]
        expected = (documents[-1].offset + documents[-1].tokens if documents else 0) * self.dtype.itemsize
        actual = path.stat().st_size if path.is_file() else None
        if actual != expected:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise FileFormatError(f"{path.name} {found}, but its manifest says {expected} bytes")
        # An empty file can't be mapped.
        return np.memmap(path, self.dtype, "r").view(np.ndarray) if expected else np.empty(0, self.dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        if self.manifest["tokenizer"]["kind"] == BYTES:
            return ByteTokenizer()
        path = self.folder / TOKENIZER_FILE
        try:
            model = door.read_bytes(path)
        except OSError as error:
            raise FileFormatError(f"can't read '{path}': {error.strerror}; prepare the folder again") from None
        if hashlib.sha256(model).hexdigest() != self.manifest["tokenizer"]["sha256"]:
            raise FileFormatError(f"'{path}' is not the tokenizer that made the tokens: its SHA-256 differs")
        tokenizer = tokenizer_from_model(model, str(path))
        if tokenizer.size != self.eos_token_id:
            raise FileFormatError(f"'{path}' has {tokenizer.size} pieces, its manifest says {self.eos_token_id}")
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes with any document, its position, or the tokenizer."""
        digest = hashlib.sha256(self.manifest["tokenizer"]["sha256"].encode())
        for split in SPLITS:
            for document in self._documents[split]:
                digest.update(f"{split}\0{document.name}\0{document.tokens}\0{document.sha256}\n".encode())
        return digest.hexdigest()[:32]

    def documents(self, split: str) -> list[DocumentInfo]:
        """The documents of a split, in the order of their tokens."""
        if split not in self._documents:
            raise DataError(f"unknown split '{split}'{did_you_mean(split, SPLITS)}; the splits are {', '.join(SPLITS)}")
        return self._documents[split]

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Number of tokens of each document of a split, without document marks."""
        return np.array([document.tokens for document in self.documents(split)], dtype=np.int64)

    def tokens(self, split: str, index: int) -> NDArray[np.unsignedinteger]:
        """The tokens of one document: a read-only view into the mapped file, checked when first used."""
        document = self.documents(split)[index]
        tokens = self._files[split][document.offset : document.offset + document.tokens]
        if (split, index) not in self._whole:
            if not _is_whole(document, tokens, self.eos_token_id):
                raise FileFormatError(
                    f"'{self.folder / token_file(split)}' is damaged: the tokens of '{document.name}' have changed "
                    "(SHA-256 differs); prepare the folder again"
                )
            self._whole.add((split, index))
        return tokens

    def find(self, name: str) -> tuple[str, int]:
        """Split and index of a document, by its name."""
        if name not in self._place:
            hint = did_you_mean(name, self._place)
            raise DataError(f"'{self.folder}' has no document '{name}'{hint}; its manifest.json lists them")
        return self._place[name]

    def text(self, name: str) -> str:
        """A document as text."""
        return b"".join(self.text_pieces(*self.find(name))).decode("utf-8", "replace")

    def text_pieces(self, split: str, index: int) -> Iterator[bytes]:
        """A document as pieces of UTF-8, cut anywhere, so that a huge one needs little memory."""
        tokens = self.tokens(split, index)
        for start in range(0, len(tokens), DECODE_TOKENS):
            yield self.tokenizer.decode_bytes(tokens[start : start + DECODE_TOKENS], begin=start == 0)


def _is_whole(document: DocumentInfo, tokens: NDArray[np.unsignedinteger], size: int) -> bool:
    """Whether tokens are in the vocabulary and match the hash in the manifest (for bytes, the hash of the text)."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), DECODE_TOKENS):
        piece = tokens[start : start + DECODE_TOKENS]
        if piece.max() >= size:
            return False
        if document.tokens_sha256 is None:
            piece = piece.astype(np.uint8)
        digest.update(piece.data)
    return digest.hexdigest() == (document.tokens_sha256 or document.sha256)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with its hash; one line per document, for easy reading and diffing."""
    manifest = dict(manifest)
    rows = ",\n".join(json.dumps(document, ensure_ascii=False) for document in manifest.pop("documents"))
    head = json.dumps(manifest, ensure_ascii=False, indent=1)
    path.write_text(door.seal_json(f'{head[:-2]},\n "documents": [\n{rows}\n ]\n}}'), encoding="utf-8")


def manifest_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest of version 1 without its digest; later versions are sealed."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        return door.read_manifest(folder / MANIFEST, FORMAT, {1: _RULES | {"digest": door.is_hash}, VERSION: _RULES})
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"'{folder}' is not prepared data: it has no {MANIFEST}; create it with 'brt data prepare'"
        ) from None
    except OSError as error:
        raise DataError(f"can't read '{folder / MANIFEST}': {error.strerror}") from None
    except FileFormatError as error:
        raise FileFormatError(f"'{folder}' is damaged: {error}; prepare the folder again with --overwrite") from None

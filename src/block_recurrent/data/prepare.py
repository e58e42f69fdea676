"""From documents to a prepared folder: `brt data prepare`.

One thread reads documents in order, cuts them into pieces and hashes them; a pool of threads encodes pieces (of one
huge document as well as of many small ones: the tokenizers work outside Python's lock); the first thread writes the
results in order. So the folder does not depend on the number of threads, and memory holds only the pieces on their way.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from block_recurrent.data.corpus import (
    FORMAT,
    MANIFEST,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    Corpus,
    DocumentInfo,
    token_file,
    write_manifest,
)
from block_recurrent.data.files import LeftOut, Remarks
from block_recurrent.data.sources import Found, Unit, deal_split, find_documents
from block_recurrent.data.staging import staged_folder
from block_recurrent.data.tokenizer import BYTES, Encoded, Tokenizer
from block_recurrent.data.words import NOTHING, Counts, count
from block_recurrent.data.writing import TokenWriter
from block_recurrent.errors import DataError

OUR_FILES = {MANIFEST, TOKENIZER_FILE, *map(token_file, SPLITS)}
BATCH_BYTES = 1 << 19
PIECE_OVERHEAD_BYTES = 1 << 10
Progress = Callable[[int, int], None]  # documents and bytes done so far


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare, and how."""

    sources: tuple[str, ...]
    unit: Unit = "file"
    validation: float = 0.05  # shares of documents, for sources that have no folders train, validation, test
    test: float = 0.05
    strict: bool = False  # refuse text that is not UTF-8 instead of replacing what can't be decoded
    overwrite: bool = False  # replace a folder prepared before
    threads: int | None = None  # None: one per processor

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("there is no source; give a file, a folder, 'stdlib' or 'hf:NAME'")
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not 0 <= share <= 1:
                raise DataError(f"the share --{name} must be 0 to 1, not {share}")
        if self.validation + self.test > 1:
            raise DataError(f"--validation and --test can't be more than 1 together, not {self.validation + self.test}")
        if self.threads is not None and self.threads < 1:
            raise DataError(f"--threads must be at least 1, not {self.threads}")


def prepare(settings: PrepareSettings, tokenizer: Tokenizer, out: Path, progress: Progress | None = None) -> Corpus:
    """Prepares documents into the folder `out`, whole or not at all."""
    _check_outside_sources(out, settings.sources)
    try:
        with staged_folder(out, lambda target: _check_target(target, settings.overwrite)) as folder:
            with TokenWriter(folder, tokenizer.dtype) as writer:
                work = _Preparation(settings, tokenizer, writer, progress or (lambda documents, size: None))
                work.run()
            if tokenizer.model is not None:
                (folder / TOKENIZER_FILE).write_bytes(tokenizer.model)
            write_manifest(folder / MANIFEST, work.manifest())
    except OSError as error:
        full = "; the disk is full: make room and run again" if error.errno == errno.ENOSPC else ""
        raise DataError(f"can't write to '{out}': {error.strerror or error}{full}") from None
    return Corpus(out)


@dataclass
class _Open:
    """A document on its way through the pipeline."""

    name: str
    split: str
    offset: int = 0
    remarks: Remarks = field(default_factory=Remarks)
    text_digest: Any = field(default_factory=hashlib.sha256)
    token_digest: Any = field(default_factory=hashlib.sha256)
    bytes: int = 0
    tokens: int = 0
    exact: bool = True
    lost: int = 0
    unknown: int = 0
    counts: Counts = NOTHING
    failure: LeftOut | None = None


class _Piece(NamedTuple):
    """A piece of a document; without bytes, the document's end."""

    current: _Open
    raw: bytes | None
    is_first: bool


Outcome = tuple[_Open, Encoded, Counts] | tuple[_Open, None, None]


def _work(tokenizer: Tokenizer, pieces: list[_Piece], before: Future[list[Outcome]] | None) -> list[Outcome]:
    """Encodes, counts and hashes pieces, in a thread of the pool."""
    outcomes: list[Outcome] = []
    for current, raw, is_first in pieces:
        if raw is None:
            outcomes.append((current, None, None))
        else:
            outcomes.append((current, tokenizer.encode_piece(raw, is_first), count(raw)))
    # Pieces of one document are hashed in order. The pool starts jobs in order too, so the one before is under way.
    if before is not None and not pieces[0].is_first:
        wait([before])
    for current, raw, _ in pieces:
        if raw is not None:
            current.text_digest.update(raw)
    return outcomes


class _Preparation:
    """One run over all sources."""

    def __init__(
        self, settings: PrepareSettings, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress
    ) -> None:
        self._settings, self._tokenizer, self._writer, self._progress = settings, tokenizer, writer, progress
        self._documents: list[DocumentInfo] = []
        self._left_out: list[LeftOut] = []
        self._names: set[str] = set()
        self._bytes = 0

    def run(self) -> None:
        threads = self._settings.threads or os.cpu_count() or 1
        pool = ThreadPoolExecutor(threads)
        jobs: deque[Future[list[Outcome]]] = deque()
        try:
            for batch in _batches(self._pieces()):
                jobs.append(pool.submit(_work, self._tokenizer, batch, jobs[-1] if jobs else None))
                if len(jobs) > threads + 2:
                    self._take_in(jobs.popleft())
            while jobs:
                self._take_in(jobs.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if not self._documents:
            reasons = "; ".join(map(str, self._left_out[:3])) or "the source is empty"
            raise DataError(f"there is no document to prepare in {', '.join(self._settings.sources)} ({reasons})")

    def _found(self) -> Iterator[Found]:
        sources = self._settings.sources
        return itertools.chain.from_iterable(find_documents(source, self._settings.unit) for source in sources)

    def _pieces(self) -> Iterator[_Piece]:
        """The pieces of each document, and its end."""
        for found in self._found():
            if isinstance(found, LeftOut):
                self._left_out.append(found)
                continue
            if found.name in self._names:
                self._left_out.append(LeftOut(found.name, "has the name of an earlier document"))
                continue
            self._names.add(found.name)
            split = found.split or deal_split(found.name, self._settings.validation, self._settings.test)
            current = _Open(found.name, split, remarks=Remarks(strict=self._settings.strict))
            try:
                for raw in self._tokenizer.cut(found.read(current.remarks)):
                    yield _Piece(current, raw, is_first=current.bytes == 0)
                    current.bytes += len(raw)
            except LeftOut as failure:
                current.failure = failure
            yield _Piece(current, None, is_first=False)

    def _take_in(self, job: Future[list[Outcome]]) -> None:
        for current, encoded, counts in job.result():
            if encoded is None or counts is None:
                self._close(current)
                continue
            if current.tokens == 0:
                current.offset = self._writer.end(current.split)
            self._writer.append(current.split, encoded.tokens)
            if self._tokenizer.model is not None:
                current.token_digest.update(encoded.tokens)
            current.tokens += len(encoded.tokens)
            current.exact &= encoded.exact
            current.lost += encoded.lost
            current.unknown += encoded.unknown
            current.counts = current.counts.then(counts)
        self._progress(len(self._documents), self._bytes)

    def _close(self, current: _Open) -> None:
        self._left_out += current.remarks.left_out
        if current.failure is None and current.tokens == 0:
            current.failure = LeftOut(current.name, "gives no tokens" if current.bytes else "is empty")
        if current.failure is not None:
            if current.tokens:
                self._writer.take_back(current.split, current.offset)
            self._left_out.append(current.failure)
            return
        self._bytes += current.bytes
        self._documents.append(
            DocumentInfo(
                name=current.name,
                split=current.split,
                offset=current.offset,
                tokens=current.tokens,
                bytes=current.bytes,
                words=current.counts.words,
                characters=current.counts.characters,
                sha256=current.text_digest.hexdigest(),
                tokens_sha256=current.token_digest.hexdigest() if self._tokenizer.model is not None else None,
                exact=current.exact,
                replaced=current.remarks.replaced,
                nul=current.remarks.nul,
                lost=current.lost,
                unknown=current.unknown,
            )
        )

    def manifest(self) -> dict[str, Any]:
        """All that manifest.json says."""
        has_file = self._tokenizer.model is not None
        return {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": {
                "kind": "sentencepiece" if has_file else BYTES,
                "size": self._tokenizer.size,
                "sha256": self._tokenizer.sha256,
                "file": TOKENIZER_FILE if has_file else None,
            },
            "dtype": self._tokenizer.dtype.name,
            "settings": {
                "sources": list(self._settings.sources),
                "unit": self._settings.unit,
                "validation": self._settings.validation,
                "test": self._settings.test,
            },
            "splits": {split: self._totals(split) for split in SPLITS},
            "left_out": [{"name": left.name, "reason": left.reason} for left in self._left_out],
            "documents": [asdict(document) for document in self._documents],
        }

    def _totals(self, split: str) -> dict[str, Any]:
        documents = [document for document in self._documents if document.split == split]
        totals = {key: sum(getattr(each, key) for each in documents) for key in ("tokens", "bytes", "words")}
        return {"file": token_file(split), "documents": len(documents), **totals}


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in groups that are worth a thread's while: documents can be tiny."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.raw or b"") + PIECE_OVERHEAD_BYTES
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_outside_sources(out: Path, sources: tuple[str, ...]) -> None:
    target = Path(os.path.abspath(out))
    for source in sources:
        folder = Path(os.path.abspath(source))
        if folder.is_dir() and (folder == target or folder in target.parents):
            raise DataError(f"--out '{out}' lies inside the source '{source}', which would read it; give another --out")


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"--out '{out}' is a file; give a folder")
    entries = {entry.name for entry in out.iterdir()}
    if not entries:
        return
    if MANIFEST not in entries or entries - OUR_FILES:
        strange = min(entries - OUR_FILES or entries)
        raise DataError(f"--out '{out}' holds '{strange}', which is not prepared data; give another --out")
    if not overwrite:
        raise DataError(f"--out '{out}' already holds prepared data; give --overwrite to replace it, or another --out")

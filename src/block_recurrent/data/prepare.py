"""From documents to a prepared folder: `brt data prepare`.

One thread reads documents in order and cuts them into pieces; the threads of the pipeline encode them; the first thread
writes the results in order. So the folder does not depend on the number of threads.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from block_recurrent.data.pipeline import OpenDocument, Piece, encode_pieces
from block_recurrent.data.sources import Unit, deal_split, find_documents
from block_recurrent.data.staging import staged_folder
from block_recurrent.data.tokenizer import BYTES, Encoded, Tokenizer
from block_recurrent.data.words import Counts
from block_recurrent.data.writing import TokenWriter
from block_recurrent.errors import DataError

OUR_FILES = {MANIFEST, TOKENIZER_FILE, *map(token_file, SPLITS)}
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


class _Preparation:
    """One run over all sources."""

    def __init__(
        self, settings: PrepareSettings, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress
    ) -> None:
        self._settings, self._tokenizer, self._writer, self._progress = settings, tokenizer, writer, progress
        self._documents: list[DocumentInfo] = []
        self._left_out: list[LeftOut] = []
        self._names: set[str] = set()
        self._tokens_are_text = tokenizer.model is None  # so that one hash holds both
        self._bytes = 0

    def run(self) -> None:
        threads = self._settings.threads or os.cpu_count() or 1
        # Closed at once when something goes wrong: no thread works on.
        with closing(encode_pieces(self._pieces(), self._tokenizer, threads)) as outcomes:
            for document, result in outcomes:
                if result is None:
                    self._close(document)
                else:
                    self._take_in(document, *result)
                self._progress(len(self._documents), self._bytes)
        if not self._documents:
            reasons = "; ".join(map(str, self._left_out[:3])) or "the source is empty"
            raise DataError(f"there is no document to prepare in {', '.join(self._settings.sources)} ({reasons})")

    def _pieces(self) -> Iterator[Piece]:
        """The pieces of each document, and its end."""
        sources = self._settings.sources
        for found in itertools.chain.from_iterable(find_documents(each, self._settings.unit) for each in sources):
            if isinstance(found, LeftOut):
                self._left_out.append(found)
                continue
            if found.name in self._names:
                self._left_out.append(LeftOut(found.name, "has the name of an earlier document"))
                continue
            self._names.add(found.name)
            split = found.split or deal_split(found.name, self._settings.validation, self._settings.test)
            document = OpenDocument(found.name, split, Remarks(strict=self._settings.strict))
            try:
                for index, raw in enumerate(self._tokenizer.cut(found.read(document.remarks))):
                    yield Piece(document, raw, is_first=index == 0)
            except LeftOut as failure:
                document.failure = failure
            yield Piece(document, None)

    def _take_in(self, document: OpenDocument, encoded: Encoded, counts: Counts) -> None:
        if document.tokens == 0:
            document.offset = self._writer.end(document.split)
        self._writer.append(document.split, encoded.tokens)
        if not self._tokens_are_text:
            document.token_digest.update(encoded.tokens)
        document.add(encoded, counts)
        self._bytes += counts.bytes

    def _close(self, document: OpenDocument) -> None:
        self._left_out += document.remarks.left_out
        failure = document.failure
        if failure is None and document.tokens == 0:
            failure = LeftOut(document.name, "gives no tokens" if document.counts.bytes else "is empty")
        if failure is None:
            self._documents.append(document.info(self._tokens_are_text))
            return
        self._left_out.append(failure)
        if document.tokens:
            self._writer.take_back(document.split, document.offset)

    def manifest(self) -> dict[str, Any]:
        """All that manifest.json says."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": {
                "kind": BYTES if self._tokens_are_text else "sentencepiece",
                "size": self._tokenizer.size,
                "sha256": self._tokenizer.sha256,
                "file": None if self._tokens_are_text else TOKENIZER_FILE,
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
            "documents": [dict(vars(document)) for document in self._documents],
        }

    def _totals(self, split: str) -> dict[str, Any]:
        documents = [document for document in self._documents if document.split == split]
        totals = {key: sum(getattr(each, key) for each in documents) for key in ("tokens", "bytes", "words")}
        return {"file": token_file(split), "documents": len(documents), **totals}


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

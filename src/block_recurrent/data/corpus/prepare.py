"""Preparing documents: `brt data prepare`.

Documents are read in order, encoded piece by piece in threads, and written in order, so the result does not
depend on the number of threads.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from block_recurrent.data.corpus.corpus import (
    FORMAT,
    OUR_FILES,
    TOKENIZER_FILE,
    VERSION,
    Corpus,
    DocumentInfo,
    token_file,
    write_manifest,
)
from block_recurrent.data.corpus.encoding import OpenDocument, encode_documents
from block_recurrent.data.corpus.token_files import TokenWriter
from block_recurrent.data.sources import KINDS, find_documents
from block_recurrent.data.sources.document import SPLITS, Document, LeftOut, Package, check_shares, deal
from block_recurrent.data.sources.text import Unit
from block_recurrent.data.tokenizers.base import BYTES, Encoded, Tokenizer
from block_recurrent.data.utf8 import Counts, to_utf8
from block_recurrent.errors import DataError, OutputError
from block_recurrent.io.atomic import atomic_folder
from block_recurrent.io.door import MANIFEST

Progress = Callable[[int, int], None]  # documents and bytes done so far


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare, and how."""

    sources: tuple[str, ...]
    unit: Unit = "file"
    validation: float = 0.05  # shares of documents, for sources that have no folders train, validation, test
    test: float = 0.05
    strict: bool = False  # reject text that is not UTF-8, instead of replacing invalid bytes
    overwrite: bool = False  # replace an existing prepared folder
    threads: int | None = None  # None: one per processor

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError(f"no source given; give {KINDS}")
        check_shares(self.validation, self.test)
        if self.threads is not None and self.threads < 1:
            raise DataError(f"--threads must be at least 1, not {self.threads}")


def prepare(settings: PrepareSettings, tokenizer: Tokenizer, out: Path, progress: Progress | None = None) -> Corpus:
    """Prepare documents: tokenize them into the folder `out`, atomically.

    Args:
        settings: the sources, and how to split and read them.
        tokenizer: the tokenizer.
        out: the folder to create.
        progress: called with the number of documents and of bytes done.
    """
    _check_outside_sources(out, settings.sources)
    try:
        with atomic_folder(out, lambda target: _check_target(target, settings.overwrite)) as folder:
            with TokenWriter(folder, tokenizer.dtype) as writer:
                work = _Preparation(settings, tokenizer, writer, progress or (lambda documents, size: None))
                work.run()
            if tokenizer.model is not None:
                (folder / TOKENIZER_FILE).write_bytes(tokenizer.model)
            write_manifest(folder / MANIFEST, work.manifest())
    except OSError as error:
        full = "; the disk is full: free some space and run again" if error.errno == errno.ENOSPC else ""
        raise OutputError(f"can't write to '{out}': {error.strerror or error}{full}") from None
    return Corpus(out)


class _Preparation:
    """One run over all sources."""

    def __init__(
        self, settings: PrepareSettings, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress
    ) -> None:
        self._settings, self._tokenizer, self._writer, self._progress = settings, tokenizer, writer, progress
        self._documents: list[DocumentInfo] = []
        # Two lists, so that their order does not depend on how far reading is ahead of encoding.
        self._not_read: list[LeftOut] = []
        self._not_kept: list[LeftOut] = []
        self._packages: dict[Package, None] = {}  # in the order in which they were found
        self._tokens_are_text = tokenizer.model is None  # so that one hash holds both
        self._bytes = 0

    def run(self) -> None:
        settings = self._settings
        threads = settings.threads or os.cpu_count() or 1
        outcomes = encode_documents(self._found(), self._tokenizer, strict=settings.strict, threads=threads)
        with closing(outcomes):  # stops the threads immediately on an error
            for document, result in outcomes:
                if result is None:
                    self._close(document)
                else:
                    self._take_in(document, *result)
                self._progress(len(self._documents), self._bytes)
        if not self._documents:
            reasons = "; ".join(map(str, self._left_out[:3])) or "the source is empty"
            raise DataError(f"no documents found in {', '.join(settings.sources)} ({reasons})")

    def _found(self) -> Iterator[Document]:
        """The documents of all sources, each with its split."""
        settings, names = self._settings, set[str]()
        every = itertools.chain.from_iterable(find_documents(each, settings.unit) for each in settings.sources)
        for found in deal(every, settings.validation, settings.test):
            found = replace(found, name=to_utf8(found.name).decode())  # a name may contain an incomplete character
            if isinstance(found, LeftOut):
                self._not_read.append(found)
            elif found.name in names:
                self._not_read.append(LeftOut(found.name, "has the same name as an earlier document"))
            else:
                names.add(found.name)
                if found.package is not None:
                    self._packages[found.package] = None
                yield found

    @property
    def _left_out(self) -> list[LeftOut]:
        return self._not_read + self._not_kept

    def _take_in(self, document: OpenDocument, encoded: Encoded, counts: Counts) -> None:
        if document.tokens == 0:
            document.offset = self._writer.end(document.split)
        self._writer.append(document.split, encoded.tokens)
        if not self._tokens_are_text:
            document.token_digest.update(encoded.tokens)
        document.add(encoded, counts)
        self._bytes += counts.bytes

    def _close(self, document: OpenDocument) -> None:
        self._not_kept += document.remarks.left_out
        failure = document.failure
        if failure is None and document.tokens == 0:
            failure = LeftOut(document.name, "has no tokens" if document.counts.bytes else "is empty")
        if failure is None:
            self._documents.append(document.info(self._tokens_are_text))
            return
        self._not_kept.append(failure)
        if document.tokens:
            self._writer.take_back(document.split, document.offset)

    def manifest(self) -> dict[str, Any]:
        """The contents of manifest.json."""
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
            "left_out": [dict(vars(left)) for left in self._left_out],
            **({"packages": [dict(vars(package)) for package in self._packages]} if self._packages else {}),
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
            raise DataError(f"--out '{out}' is inside the source '{source}'; choose another --out")


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
        raise DataError(f"--out '{out}' contains '{strange}', which is not prepared data; choose another --out")
    if not overwrite:
        raise DataError(
            f"--out '{out}' already contains prepared data; give --overwrite to replace it, or another --out"
        )

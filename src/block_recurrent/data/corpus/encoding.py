"""Multithreaded encoding: turns documents into tokens and counts, in the same order.

The pool works on pieces, of one huge document as well as of many small ones; the tokenizers, the hash and the counts
release the GIL. Only the pieces being processed are in memory.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from block_recurrent.data.corpus.corpus import DocumentInfo
from block_recurrent.data.sources.document import Document, LeftOut, Remarks, UnreadableError
from block_recurrent.data.tokenizers.base import Encoded, Tokenizer
from block_recurrent.data.utf8 import NOTHING, Counts, count

BATCH_BYTES = 1 << 19
PIECE_OVERHEAD_BYTES = 1 << 10


@dataclass
class OpenDocument:
    """A document being encoded: the totals of its pieces so far."""

    name: str
    split: str
    remarks: Remarks
    failure: LeftOut | None = None
    offset: int = 0
    tokens: int = 0
    exact: bool = True
    lost: int = 0
    unknown: int = 0
    counts: Counts = NOTHING
    text_digest: Any = field(default_factory=hashlib.sha256)
    token_digest: Any = field(default_factory=hashlib.sha256)

    def add(self, encoded: Encoded, counts: Counts) -> None:
        """Adds the results of one piece."""
        self.tokens += len(encoded.tokens)
        self.exact &= encoded.exact
        self.lost += encoded.lost
        self.unknown += encoded.unknown
        self.counts = self.counts.then(counts)

    def info(self, tokens_are_text: bool) -> DocumentInfo:
        """The document's entry in the manifest."""
        return DocumentInfo(
            name=self.name,
            split=self.split,
            offset=self.offset,
            tokens=self.tokens,
            bytes=self.counts.bytes,
            words=self.counts.words,
            characters=self.counts.characters,
            sha256=self.text_digest.hexdigest(),
            tokens_sha256=None if tokens_are_text else self.token_digest.hexdigest(),
            exact=self.exact,
            replaced=self.remarks.replaced,
            nul=self.remarks.nul,
            lost=self.lost,
            unknown=self.unknown,
        )


class Piece(NamedTuple):
    """A piece of a document; without bytes, the document's end."""

    document: OpenDocument
    raw: bytes | None
    is_first: bool = False


# The result of a piece; None for the document's end.
Outcome = tuple[OpenDocument, tuple[Encoded, Counts] | None]


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, *, strict: bool, threads: int
) -> Generator[Outcome]:
    """Reads documents, which know their split, and encodes, counts and hashes them in threads, piece by piece.

    The outcomes are in the order of the text; a final one marks the end of each document.
    """
    pool = ThreadPoolExecutor(threads)
    jobs: deque[Future[list[Outcome]]] = deque()
    try:
        for batch in _batches(_pieces(documents, tokenizer, strict)):
            jobs.append(pool.submit(_work, tokenizer, batch, jobs[-1] if jobs else None))
            if len(jobs) > threads + 2:
                yield from jobs.popleft().result()
        while jobs:
            yield from jobs.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pieces(documents: Iterable[Document], tokenizer: Tokenizer, strict: bool) -> Iterator[Piece]:
    for source in documents:
        assert source.split is not None
        document = OpenDocument(source.name, source.split, Remarks(strict))
        try:
            for index, raw in enumerate(tokenizer.cut(source.read(document.remarks))):
                yield Piece(document, raw, is_first=index == 0)
        except UnreadableError as error:
            document.failure = error.left_out
        yield Piece(document, None)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces that are large enough for a thread: documents can be tiny."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.raw or b"") + PIECE_OVERHEAD_BYTES
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _work(tokenizer: Tokenizer, pieces: list[Piece], before: Future[list[Outcome]] | None) -> list[Outcome]:
    outcomes: list[Outcome] = [
        (document, None if raw is None else (tokenizer.encode_piece(raw, is_first), count(raw)))
        for document, raw, is_first in pieces
    ]
    # Pieces of one document are hashed in order. The pool starts jobs in order too, so the previous one is running.
    if before is not None and not pieces[0].is_first:
        wait([before])
    for document, raw, _ in pieces:
        if raw is not None:
            document.text_digest.update(raw)
    return outcomes

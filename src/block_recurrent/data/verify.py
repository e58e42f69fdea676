"""`brt data verify`: does a prepared folder still hold what its manifest says?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from block_recurrent.data.corpus import MANIFEST, SPLITS, Corpus, DocumentInfo, manifest_digest
from block_recurrent.errors import DataError

PIECE_TOKENS = 1 << 18


def problems(corpus: Corpus) -> Iterator[str]:
    """What is wrong with a corpus, one line each. (Sizes and index were checked when it was opened.)"""
    if manifest_digest(corpus.manifest) != corpus.manifest.get("digest"):
        yield f"{MANIFEST} was changed after it was written"
    for split in SPLITS:
        for index, document in enumerate(corpus.documents(split)):
            try:
                yield from (f"{document.name}: {problem}" for problem in _of_document(corpus, index, document))
            except DataError as error:  # a token outside the vocabulary
                yield f"{document.name}: {error}"


def _of_document(corpus: Corpus, index: int, document: DocumentInfo) -> Iterator[str]:
    tokens = corpus.tokens(document.split, index)
    if document.tokens_sha256 is not None:
        digest = hashlib.sha256()
        for start in range(0, len(tokens), PIECE_TOKENS):
            digest.update(tokens[start : start + PIECE_TOKENS].data)
        if digest.hexdigest() != document.tokens_sha256:
            yield "its tokens are not those that were written (SHA-256 differs)"
            return
    if not document.exact:
        return
    digest, size = hashlib.sha256(), 0
    for piece in corpus.text_pieces(document.split, index):
        digest.update(piece)
        size += len(piece)
    if digest.hexdigest() != document.sha256 or size != document.bytes:
        yield "its text is not the one that was read (SHA-256 differs)"

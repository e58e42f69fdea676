"""The functions of books.yaml: reads documents and counts words and bytes exactly as `brt data prepare` does."""

from __future__ import annotations

from typing import Any

from block_recurrent.data.sources import find_documents
from block_recurrent.data.sources.document import LeftOut, Remarks, UnreadableError
from block_recurrent.errors import DataError


def load(folder: str | None = None, **_: Any) -> dict[str, Any]:
    """The texts of a folder, each file one document, as a `datasets` split."""
    import datasets

    if not folder:
        raise DataError('the task \'books\' needs a folder of text files: give metadata, such as {"folder": "books"}')
    documents = []
    for found in find_documents(folder):
        if isinstance(found, LeftOut):
            continue
        try:
            text = b"".join(found.read(Remarks())).decode("utf-8")
        except UnreadableError:
            continue
        if text:
            documents.append({"name": found.name, "text": text})
    if not documents:
        raise DataError(f"'{folder}' has no text to score")
    return {"test": datasets.Dataset.from_list(documents)}


def text_of(doc: dict[str, str]) -> str:
    """The text itself: in a template, braces in a book would be interpreted as expressions."""
    return doc["text"]


def process_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood with words (separated by white space) and UTF-8 bytes."""
    (log_likelihood,) = results
    words, size = len(doc["text"].split()), len(doc["text"].encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, size),
        "bits_per_byte": (log_likelihood, size),
    }

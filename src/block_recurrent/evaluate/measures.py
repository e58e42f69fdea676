"""The metrics of an evaluation, with their definitions and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.data import Corpus, DocumentInfo
from block_recurrent.errors import DataError

DEFINITIONS = {
    "bits_per_token": "sum of -log2 p(token) / tokens; every token once, including the first; no document mark",
    "bits_per_byte": "the same sum / UTF-8 bytes of the original text",
    "word_perplexity": "2^(the same sum / words)",
    "tokens_per_word": "tokens / words, the scale factor",
}
MEASURES = ("bits_per_token", "bits_per_byte", "word_perplexity")

PG19_WORDS = {"test": 6_966_499, "validation": 3_007_061}
PG19_DOCUMENTS = {"test": 100, "validation": 50}
RESAMPLES = 10_000
COVERAGE = 0.95
FEW_DOCUMENTS = 5
"""With fewer documents, an interval is flagged as unreliable."""


@dataclass(frozen=True)
class Score:
    """Bits of a text, and its numbers of tokens, bytes and words."""

    name: str
    bits: float
    tokens: int
    bytes: int
    words: int

    @property
    def bits_per_token(self) -> float | None:
        return self.bits / self.tokens if self.tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.bits / self.bytes if self.bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """Infinite if it exceeds a float64."""
        if not self.words:
            return None
        exponent = self.bits / self.words
        return 2.0**exponent if exponent < 1024 else float("inf")

    @property
    def tokens_per_word(self) -> float | None:
        return self.tokens / self.words if self.words else None

    def to_dict(self) -> dict[str, Any]:
        measures = {name: getattr(self, name) for name in (*MEASURES, "tokens_per_word")}
        counts = {name: getattr(self, name) for name in ("bits", "tokens", "bytes", "words")}
        return {"name": self.name, **measures, **counts}


def score_of(document: DocumentInfo, bits: float) -> Score:
    """The score of one document; words are separated by white space."""
    return Score(document.name, bits, document.tokens, document.bytes, document.words)


def total(scores: Sequence[Score], name: str, words: int | None = None) -> Score:
    """The total of all documents; `words`: a published number of words."""
    counted = sum(s.words for s in scores)
    return Score(
        name,
        sum(s.bits for s in scores),
        sum(s.tokens for s in scores),
        sum(s.bytes for s in scores),
        counted if words is None else words,
    )


def published_words(corpus: Corpus, split: str, choice: str = "auto") -> int | None:
    """The published number of words, for PG19's whole test or validation split; None: count white-space words.

    choice: auto (PG19 is recognized by the name of its source and its number of documents), counted, or pg19.
    """
    whole = len(corpus.documents(split)) == PG19_DOCUMENTS.get(split)
    sources = corpus.manifest.get("settings", {}).get("sources", [])
    named = any("pg19" in str(source).lower().replace("-", "").replace("_", "") for source in sources)
    if choice == "pg19" and not whole:
        raise DataError(
            f"--words pg19: the published numbers are for the whole test split (100 books) or validation split (50), "
            f"but '{split}' has {len(corpus.documents(split))} documents; use --words counted"
        )
    if choice == "pg19" or (choice == "auto" and whole and named):
        return PG19_WORDS[split]
    return None


def bootstrap(
    scores: Sequence[Score], words: int | None = None, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, list[float] | None]:
    """95% bootstrap intervals of the metrics over documents.

    None with fewer than two documents.
    """
    if len(scores) < 2:
        return dict.fromkeys(MEASURES)
    counted = max(sum(s.words for s in scores), 1)
    columns = np.array([(s.bits, s.tokens, s.bytes, s.words) for s in scores], np.float64)
    columns[:, 3] *= 1 if words is None else words / counted
    sums = _resampled_sums(columns, np.random.default_rng(seed), resamples)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = {
            "bits_per_token": sums[:, 0] / sums[:, 1],
            "bits_per_byte": sums[:, 0] / sums[:, 2],
            "word_perplexity": np.exp2(sums[:, 0] / sums[:, 3]),
        }
    tail = 100 * (1 - COVERAGE) / 2
    return {name: [float(x) for x in np.percentile(v, (tail, 100 - tail))] for name, v in values.items()}


def _resampled_sums(columns: NDArray[np.float64], rng: np.random.Generator, resamples: int) -> NDArray[np.float64]:
    """Sums over documents of each resample, (resamples, 4); a few resamples at a time, to bound memory."""
    count = len(columns)
    at_once = max(1, 2**24 // count)
    parts = [
        rng.multinomial(count, np.full(count, 1 / count), size=min(at_once, resamples - done)) @ columns
        for done in range(0, resamples, at_once)
    ]
    return np.concatenate(parts)

"""Scoring a split: `evaluate_split(model, corpus, split, settings)` returns all metrics, per document and in total."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from block_recurrent.data import Corpus, DocumentInfo
from block_recurrent.errors import DataError
from block_recurrent.evaluate.cumulative import CumulativeCurve, Curve
from block_recurrent.evaluate.measures import (
    DEFINITIONS,
    FEW_DOCUMENTS,
    Score,
    bootstrap,
    published_words,
    score_of,
    total,
)
from block_recurrent.evaluate.scoring import DEFAULT_LANES, score
from block_recurrent.evaluate.state_edits import StateEdit
from block_recurrent.evaluate.token_losses import TokenLosses
from block_recurrent.inference.engine import Engine
from block_recurrent.io.progress import Progress
from block_recurrent.model.language_model import BlockRecurrentLM


@dataclass(frozen=True)
class EvalSettings:
    """Options of scoring. Lanes and chunk do not affect the results."""

    lanes: int = DEFAULT_LANES
    chunk: int | None = None  # tokens per lane and call; None: a suitable number of whole segments
    per_token: Path | None = None  # a file for the loss of every token
    words: str = "auto"  # auto, counted or pg19: see `published_words`
    names: tuple[str, ...] = ()  # documents to score; empty: the whole split
    edit: StateEdit | None = None  # an experiment on the recurrent state


@dataclass(frozen=True)
class Evaluation:
    """The result of scoring a split."""

    split: str
    total: Score
    documents: tuple[Score, ...]
    intervals: dict[str, list[float] | None]
    cumulative: Curve
    words_source: str
    unknown_share: float | None
    lost_share: float | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the metrics of the whole split at the top level."""
        whole = self.total.to_dict()
        del whole["name"]
        return {
            "split": self.split,
            **whole,
            "intervals_95": self.intervals,
            "few_documents": len(self.documents) < FEW_DOCUMENTS,
            "words_source": self.words_source,
            "unknown_share": self.unknown_share,
            "lost_share": self.lost_share,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": self.total.tokens / self.seconds if self.seconds else None,
            "definitions": DEFINITIONS,
            "documents": [document.to_dict() for document in self.documents],
            "cumulative": self.cumulative.to_dict(),
        }


def evaluate_split(
    model: BlockRecurrentLM | Engine,
    corpus: Corpus,
    split: str,
    settings: EvalSettings | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score every token of a split once.

    Args:
        model: a model, or an `Engine`.
        corpus: the prepared folder; it must have the model's tokenizer (`check_tokenizer` checks this).
        split: train, validation or test.
        settings: lanes, documents, and experiments on the state.
        progress: called with the number of tokens done and their total.
    """
    settings = settings or EvalSettings()
    chosen = choose_documents(corpus, split, settings.names)
    infos = [corpus.documents(split)[index] for index in chosen]
    texts = [corpus.tokens(split, index) for index in chosen]
    whole_split = len(chosen) == len(corpus.documents(split))
    words = published_words(corpus, split, settings.words) if whole_split else None
    bits = np.zeros(len(texts))
    curve = CumulativeCurve(np.array([len(text) for text in texts], np.int64))
    began = time.perf_counter()
    path = settings.per_token
    losses = TokenLosses(path, [info.name for info in infos], texts) if path else None
    for piece in score(model, texts, settings.lanes, settings.chunk, settings.edit, progress):
        bits[piece.document] += piece.bits.sum()
        curve.add(piece.document, piece.start, piece.bits)
        if losses:
            losses.add(piece.document, piece.start, piece.bits)
    if losses:
        losses.write()
    seconds = time.perf_counter() - began
    scores = tuple(score_of(info, float(b)) for info, b in zip(infos, bits, strict=True))
    return Evaluation(
        split=split,
        total=total(scores, split, words),
        documents=scores,
        intervals=bootstrap(scores, words),
        cumulative=curve.curve(),
        words_source="white space" if words is None else "published for PG19",
        unknown_share=_share(infos, "unknown", "tokens"),
        lost_share=_share(infos, "lost", "characters"),
        seconds=seconds,
    )


def choose_documents(corpus: Corpus, split: str, names: tuple[str, ...]) -> list[int]:
    """Indices of the named documents of a split, or of all."""
    if not corpus.documents(split):
        raise DataError(f"split '{split}' has no documents; choose another --split")
    if not names:
        return list(range(len(corpus.documents(split))))
    places = [corpus.find(name) for name in names]
    for name, (where, _) in zip(names, places, strict=True):
        if where != split:
            raise DataError(f"document '{name}' is in split '{where}', not in '{split}': use --split {where}")
    return list(dict.fromkeys(index for _, index in places))


def check_tokenizer(tokenizer_sha256: str, corpus: Corpus, run: str | Path) -> None:
    """Raise an error unless the data was prepared with the run's tokenizer."""
    theirs = corpus.manifest["tokenizer"]
    if theirs["sha256"] != tokenizer_sha256:
        raise DataError(
            f"'{corpus.folder}' was prepared with another tokenizer ({theirs['kind']}, {theirs['size']} pieces, "
            f"{theirs['sha256'][:12]}) than that of run '{run}' ({tokenizer_sha256[:12]}); prepare the "
            "documents with the run's tokenizer"
        )


def _share(infos: list[DocumentInfo], part: str, whole: str) -> float | None:
    everything = sum(getattr(info, whole) for info in infos)
    return sum(getattr(info, part) for info in infos) / everything if everything else None

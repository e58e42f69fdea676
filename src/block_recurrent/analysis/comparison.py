"""Token-by-token comparison of two readings of the same documents: the paper's two qualitative studies.

A and B are two models, or one model with and without an experiment on its recurrent state. The difference of a token is
B's bits minus A's: positive where A predicts it better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_recurrent.analysis.token_text import NEVER, TokenText
from block_recurrent.data import Corpus
from block_recurrent.evaluate.cumulative import Curve, curve_of
from block_recurrent.evaluate.headroom import Headroom, headroom_of
from block_recurrent.evaluate.measures import Score, score_of, total
from block_recurrent.evaluate.scoring import bits_of
from block_recurrent.evaluate.state_edits import StateEdit
from block_recurrent.model.language_model import BlockRecurrentLM

WHERE = ("window", "segment", "beyond", "never")
WHERE_RULE = (
    "window: at most W tokens back; segment: farther, but in the same segment of N tokens; beyond: in an earlier "
    "segment; never: not mentioned before"
)


@dataclass(frozen=True)
class Reading:
    """A model, with or without a state edit."""

    label: str
    model: BlockRecurrentLM
    edit: StateEdit | None = None


@dataclass(frozen=True)
class DocumentPair:
    """One document and the losses of its tokens in both readings, in bits."""

    name: str
    text: TokenText
    bits_a: NDArray[np.float32]
    bits_b: NDArray[np.float32]
    score_a: Score
    score_b: Score

    @cached_property
    def difference(self) -> NDArray[np.float32]:
        """B's bits minus A's: positive where A is better."""
        return self.bits_b - self.bits_a


@dataclass(frozen=True)
class TopToken:
    """A token that one of the readings predicted much better than the other."""

    document: str
    index: int  # of the token in its document, from 0
    token: str
    word: str
    bits_a: float
    bits_b: float
    difference: float
    distance: int | None  # to the last earlier mention of the word; None: no earlier mention
    where: str
    proper_name: bool
    before: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison."""

    label_a: str
    label_b: str
    window: int
    segment: int
    documents: tuple[DocumentPair, ...]
    curve_a: Curve
    curve_b: Curve
    top_a: tuple[TopToken, ...]  # where A is better, the largest difference first
    top_b: tuple[TopToken, ...]  # where B is better
    headroom: tuple[Headroom, ...] = ()
    """The headroom of A and B; window and reach are A's in both."""

    @property
    def total_a(self) -> Score:
        return total([d.score_a for d in self.documents], self.label_a)

    @property
    def total_b(self) -> Score:
        return total([d.score_b for d in self.documents], self.label_b)

    @cached_property
    def name_share(self) -> float:
        """Share of proper names among all tokens, to compare with the shares among the top tokens."""
        return float(np.mean(np.concatenate([d.text.proper_names for d in self.documents])))


def compare(
    a: Reading, b: Reading, corpus: Corpus, split: str, chosen: Sequence[int], top: int = 40, **options: Any
) -> Comparison:
    """Score the chosen documents of a split with both readings, and find where they differ most.

    options: lanes, chunk and progress, as in `score`.
    """
    texts = [corpus.tokens(split, index) for index in chosen]
    infos = [corpus.documents(split)[index] for index in chosen]
    bits_a, bits_b = (bits_of(reading.model, texts, edit=reading.edit, **options) for reading in (a, b))
    curve_a, curve_b = map(curve_of, (bits_a, bits_b))
    documents = []
    for info, text, mine, theirs in zip(infos, texts, bits_a, bits_b, strict=True):
        score_a, score_b = (score_of(info, float(bits.sum(dtype=np.float64))) for bits in (mine, theirs))
        documents.append(DocumentPair(info.name, TokenText(text, corpus.tokenizer), mine, theirs, score_a, score_b))
    window, segment = a.model.config.window, a.model.config.segment
    top_a, top_b = (find_top(documents, top, sign, window, segment) for sign in (1, -1))
    reach = window * a.model.config.num_layers
    headroom = tuple(headroom_of(texts, bits, window, reach) for bits in (bits_a, bits_b))
    return Comparison(a.label, b.label, window, segment, tuple(documents), curve_a, curve_b, top_a, top_b, headroom)


def find_top(documents: Sequence[DocumentPair], top: int, sign: int, window: int, segment: int) -> tuple[TopToken, ...]:
    """The tokens with the largest difference: those where A is better with sign 1, B with sign -1."""
    best: list[tuple[float, int, int]] = []
    for number, document in enumerate(documents):
        gains = sign * document.difference
        count = min(top, len(gains))
        found = np.argpartition(-gains, count - 1)[:count].tolist() if count else []
        best += [(float(gains[i]), number, i) for i in found if gains[i] > 0]
    best.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    return tuple(_top_token(documents[number], index, window, segment) for _, number, index in best[:top])


def _top_token(document: DocumentPair, index: int, window: int, segment: int) -> TopToken:
    text = document.text
    distance = int(text.distances[index])
    before, token, after = text.excerpt(index)
    return TopToken(
        document=document.name,
        index=index,
        token=token,
        word=text.word(index),
        bits_a=float(document.bits_a[index]),
        bits_b=float(document.bits_b[index]),
        difference=float(document.difference[index]),
        distance=None if distance == NEVER else distance,
        where=where(index, distance, window, segment),
        proper_name=bool(text.proper_names[index]),
        before=before,
        after=after,
    )


def where(index: int, distance: int, window: int, segment: int) -> str:
    """Where the last earlier mention is, relative to the token at `index`: see `WHERE_RULE`.

    Token i is predicted at position i of its document, and read at position i + 1: the document mark comes first.
    """
    if distance == NEVER:
        return "never"
    if distance <= window:
        return "window"
    mention_read_at = index - distance + 1
    return "segment" if mention_read_at // segment == index // segment else "beyond"


@dataclass(frozen=True)
class DistanceBucket:
    """Tokens of words whose last earlier mention is between two distances."""

    label: str
    tokens: int
    mean_difference: float | None  # bits that A saves on such a token, on average
    share_of_gain: float | None  # share of all bits that A saves on tokens of words


def gain_by_distance(comparison: Comparison) -> list[DistanceBucket]:
    """Where A's gain comes from, by the distance to the last earlier mention of the word. Excludes white space."""
    distances, gains = [], []
    for document in comparison.documents:
        in_word = document.text.word_of >= 0
        distances.append(document.text.distances[in_word])
        gains.append(document.difference[in_word])
    distance = np.concatenate(distances)
    gain = np.concatenate(gains).astype(np.float64)
    longest = int(distance.max(initial=1))
    edges = [0, comparison.window]
    while edges[-1] < longest:
        edges.append(edges[-1] * 4)
    everything = float(gain.sum())
    buckets = []
    for low, high in itertools.pairwise(edges):
        buckets.append(_bucket(f"{low + 1:,}-{high:,}", gain[(distance > low) & (distance <= high)], everything))
    return [*buckets, _bucket("never", gain[distance == NEVER], everything)]


def _bucket(label: str, gain: NDArray[np.float64], everything: float) -> DistanceBucket:
    mean = float(gain.mean()) if len(gain) else None
    return DistanceBucket(label, len(gain), mean, float(gain.sum()) / everything if everything else None)

"""Headroom: how much a plain cache of the document would still save on top of a model's predictions.

    headroom = Headroom(window=512, reach=6144)
    headroom.add(tokens, bits)      a document, and the loss of each of its tokens
    headroom.bands()                bits per token that a cache saves, by distance

A cache of the tokens `low + 1` to `high` back assigns token t its share among these tokens (unigram), or among
those of them that followed the token t - 1 (bigram). It is mixed with the model, (1 - lambda) p_model + lambda p_cache.

Lambda is learned online. In each of a few contexts it has a discrete prior, and the weight of a value is multiplied by
the likelihood of each token, after the token has been predicted. The log likelihoods of such a mixture add
up to log2 sum_k prior_k prod_t p_k(t), so it is enough to keep the sums of log2 p_k(t), and the order of
documents does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from block_recurrent.evaluate.scoring import bits_of
from block_recurrent.model.language_model import BlockRecurrentLM

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LAMBDAS = np.concatenate([[0.0], 1 / (1 + np.exp(-np.arange(-7.0, 8.0)))])
PRIOR = np.concatenate([[0.5], np.full(15, 0.5 / 15)])
COUNT_CLASS = np.array([int(count).bit_length() for count in range(33)])
"""Class of a count up to 32: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more."""
CONTEXTS = 4 * (int(COUNT_CLASS[-1]) + 1)
MOST_BITS = 100.0  # Losses are capped at this: the inverse probability is a float32
KINDS = ("unigram", "bigram")

DEFINITIONS = {
    "headroom": (
        "mean over all tokens t of log2 p(t) - log2 p_model(t), with p = (1 - lambda) p_model + lambda p_cache: bits "
        "per token that a cache of the same document saves"
    ),
    "p_cache": (
        "unigram: the share of token t among the document's earlier tokens; bigram: its share among the tokens that "
        "followed earlier occurrences of token t - 1; no smoothing"
    ),
    "distance": (
        "of an earlier token i: t - i; each row is a separate cache that counts only tokens at these distances, so "
        "rows do not add up. window: 1 to W; reach: from there to W x layers; beyond: farther"
    ),
    "lambda": (
        "0 where the cache has no count; else by context: the count of token t - 1 at these distances (0, 1, 2-3, 4-7, "
        "8-15, 16-31, 32+) and the probability that the cache gave to what followed it the last time (no count, 0, "
        "below 1/2, from 1/2)"
    ),
    "learning": (
        "online, in one pass: in each context a Bayesian mixture of 16 values of lambda, 0 (prior 1/2) and "
        "1 / (1 + e^-k) for k = -7 to 7 (prior 1/30 each), updated after each token, over all documents; no token "
        "influences its own prediction, and a useless cache costs at most 1 bit per context in total"
    ),
    "hits": "share of all tokens that the cache has a count of",
    "captured by the memory": (
        "headroom beyond the reach with the recurrent state cleared at each segment, minus headroom beyond the reach "
        "with the state carried"
    ),
}


@dataclass(frozen=True)
class Band:
    """Savings of caches of the tokens `low + 1` to `high` back (None: no limit)."""

    label: str
    low: int
    high: int | None
    unigram: float  # bits per token
    bigram: float
    unigram_hits: float  # share of all tokens that the cache has a count of
    bigram_hits: float


class Headroom:
    """Accumulates documents with their losses, in any order, keeping a few hundred numbers per band."""

    def __init__(self, window: int, reach: int) -> None:
        self.window, self.reach = window, reach
        self.tokens, self.bits, self.longest = 0, 0.0, 0
        self._mixtures: dict[tuple[str, int, int | None], _Mixture] = {}

    def add(self, tokens: NDArray[Any], bits: NDArray[Any]) -> None:
        """Add a whole document, with the loss of each token in bits."""
        self.tokens += len(tokens)
        self.bits += float(np.sum(bits, dtype=np.float64))
        self.longest = max(self.longest, len(tokens))
        inverse = np.exp2(np.minimum(bits, MOST_BITS).astype(np.float32))
        counts = _Counts(tokens)
        for _, low, high in (*self._named_bands(), *_doublings(len(tokens))):
            if low >= len(tokens) - 1:
                continue  # no token is that far back
            for kind, cache in zip(KINDS, counts.caches(low, high), strict=True):
                self._mixtures.setdefault((kind, low, high), _Mixture()).add(cache, inverse)

    def bands(self) -> list[Band]:
        """All distances, then window, reach and beyond."""
        return [self._band(*band) for band in self._named_bands()]

    def by_distance(self) -> list[Band]:
        """Distances 1, 2, 3-4, 5-8, ... up to the longest."""
        return [self._band(*band) for band in _doublings(self.longest)]

    @property
    def bits_per_token(self) -> float:
        """Bits per token of the model alone."""
        return self.bits / max(1, self.tokens)

    @property
    def beyond(self) -> Band:
        """The headroom beyond the reach."""
        return self.bands()[-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "bits_per_token": self.bits_per_token,
            "window": self.window,
            "reach": self.reach,
            "bands": [asdict(band) for band in self.bands()],
            "by_distance": [asdict(band) for band in self.by_distance()],
        }

    def _named_bands(self) -> list[tuple[str, int, int | None]]:
        window, reach = self.window, self.reach
        return [("all", 0, None), ("window", 0, window), ("reach", window, reach), ("beyond", reach, None)]

    def _band(self, label: str, low: int, high: int | None) -> Band:
        found = [self._mixtures.get((kind, low, high), _Mixture()) for kind in KINDS]
        tokens = max(1, self.tokens)
        return Band(label, low, high, *(m.bits / tokens for m in found), *(m.hits / tokens for m in found))


def headroom_of(documents: Iterable[NDArray[Any]], bits: Iterable[NDArray[Any]], window: int, reach: int) -> Headroom:
    """The headroom of scored documents, from the loss of each token in bits."""
    headroom = Headroom(window, reach)
    for tokens, costs in zip(documents, bits, strict=True):
        headroom.add(tokens, costs)
    return headroom


def measure_headroom(model: BlockRecurrentLM, documents: Sequence[NDArray[Any]], **options: Any) -> Headroom:
    """Score documents (arrays of tokens, without marks; options as in `score`), and compute the headroom."""
    window = model.config.window
    bits = bits_of(model, documents, **options)
    return headroom_of(documents, bits, window, window * model.config.num_layers)


def taken(normal: Headroom, cleared: Headroom) -> dict[str, float]:
    """The part of the headroom beyond the reach that the memory captures, in bits per token, by kind of cache."""
    return {kind: getattr(cleared.beyond, kind) - getattr(normal.beyond, kind) for kind in KINDS}


@dataclass
class _Mixture:
    """Lambda by context: `logs[c, k]` is the sum of log2((1 - lambda_k) + lambda_k p_cache / p_model) in context c."""

    logs: Floats = field(default_factory=lambda: np.zeros((CONTEXTS, len(LAMBDAS))))
    hits: int = 0

    def add(self, cache: _Cache, inverse: NDArray[np.float32]) -> None:
        """Tokens of a document; inverse: their 1 / p_model. Logarithms in float32 for speed, sums in float64."""
        misses = np.bincount(cache.contexts[(cache.hits == 0) & (cache.totals > 0)], minlength=CONTEXTS)
        self.logs += misses[:, None] * np.log2(1 - LAMBDAS)
        hit = np.flatnonzero(cache.hits)
        self.hits += len(hit)
        contexts = cache.contexts[hit]
        ratio = (cache.hits[hit] / cache.totals[hit]).astype(np.float32) * inverse[hit]
        for k, value in enumerate(LAMBDAS.astype(np.float32)):
            self.logs[:, k] += np.bincount(contexts, np.log(1 - value + value * ratio), CONTEXTS) / math.log(2)

    @property
    def bits(self) -> float:
        """Total savings so far."""
        seen = self.logs.any(axis=1)
        return float(np.logaddexp2.reduce(self.logs[seen] + np.log2(PRIOR), axis=1).sum())


class _Cache(NamedTuple):
    """Counts of a cache before each token of a document: the token's share is hits / totals."""

    hits: Integers
    totals: Integers
    contexts: Integers


class _Counts:
    """The caches of a document."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        ids = np.asarray(tokens, np.int64)
        self._places = np.arange(len(ids))
        self._tokens = _Occurrences(ids)
        self._pairs = _Occurrences(_before(ids, -1) * (int(ids.max(initial=0)) + 1) + ids)
        last = _before(self._tokens.previous, -1)
        self._last_follower = np.where(last < 0, -1, last + 1)
        """The token that followed the last earlier occurrence of token t - 1; -1: none."""

    def caches(self, low: int, high: int | None) -> tuple[_Cache, _Cache]:
        """Unigram and bigram cache of the tokens low + 1 to high back."""
        high = len(self._places) if high is None else high
        tokens = self._tokens.within(high) - self._tokens.within(low)
        pairs = self._pairs.within(high) - self._pairs.within(low)
        everything = np.minimum(self._places, high) - np.minimum(self._places, low)
        followers = _before(tokens, 0)  # where token t - 1 was d before itself, what followed it is d before t
        counted = 4 * COUNT_CLASS[np.minimum(followers, len(COUNT_CLASS) - 1)]
        unigram, bigram = (
            _Cache(hits, totals, counted + self._last_time(hits, totals))
            for hits, totals in ((tokens, everything), (pairs, followers))
        )
        return unigram, bigram

    def _last_time(self, hits: Integers, totals: Integers) -> Integers:
        """0 to 3, see DEFINITIONS: how well the cache did the last time that something followed token t - 1."""
        did = (totals > 0).astype(np.int64) + (hits > 0) + ((hits > 0) & (2 * hits >= totals))
        return np.append(did, 0)[self._last_follower]


class _Occurrences:
    """The positions of each key of an array, for counting equal ones before it."""

    def __init__(self, keys: Integers) -> None:
        size = len(keys)
        self._order = np.argsort(keys, kind="stable")
        ordered = keys[self._order]
        same = np.diff(ordered, prepend=ordered[:1] - 1) == 0
        # Ascending, and no two keys are less than size + 1 apart: subtracting a distance never leads to another key.
        self._sorted = np.cumsum(~same) * (2 * size) + self._order
        self.previous = np.full(size, -1)
        """The last earlier position of the same key, or -1."""
        self.previous[self._order[same]] = self._order[np.flatnonzero(same) - 1]
        self.within = lru_cache(maxsize=4)(self._within)

    def _within(self, distance: int) -> Integers:
        """For each position, how many of the `distance` positions before it have the same key."""
        size = len(self._order)
        first = np.searchsorted(self._sorted, self._sorted - min(distance, size))
        counts = np.empty(size, np.int64)
        counts[self._order] = np.arange(size) - first
        return counts


def _before(values: Integers, first: int) -> Integers:
    """The value before each position."""
    return np.concatenate([[first], values])[: len(values)]


def _doublings(length: int) -> list[tuple[str, int, int | None]]:
    """Bands of doubling width, for a document of this many tokens."""
    edges = [0, *(2**k for k in range(max(0, length - 2).bit_length() + 1))] if length > 1 else []
    return [
        (f"{high:,}" if high == low + 1 else f"{low + 1:,}-{high:,}", low, high)
        for low, high in itertools.pairwise(edges)
    ]

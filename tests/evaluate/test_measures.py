"""Hand-made cases: with known losses, every measure is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM
from block_recurrent.data import Corpus
from block_recurrent.errors import DataError
from block_recurrent.evaluate.cumulative import CumulativeCurve, grid_of
from block_recurrent.evaluate.evaluation import EvalSettings, evaluate_split
from block_recurrent.evaluate.measures import PG19_WORDS, Score, bootstrap, published_words, total

TEXTS = {"a.txt": "one two three\n", "b.txt": "é ü\n", "c.txt": "x"}


def test_a_uniform_model_has_log2_v_bits_per_token(
    make_corpus: Callable[..., Corpus], make_reader: Callable[..., BlockRecurrentLM]
) -> None:
    """Zero embeddings give equal logits: every token costs log2(257) bits, whatever the text."""
    model = make_reader()
    torch.nn.init.zeros_(model.embedding.weight)
    result = evaluate_split(model, make_corpus(TEXTS), "test")
    bits, tokens, words = math.log2(257), 14 + 6 + 1, 3 + 2 + 1
    assert result.total.tokens == result.total.bytes == tokens
    assert result.total.words == words
    assert result.total.bits_per_token == pytest.approx(bits, abs=1e-6)
    assert result.total.bits_per_byte == pytest.approx(bits, abs=1e-6)
    assert result.total.word_perplexity == pytest.approx(2 ** (bits * tokens / words), rel=1e-5)
    assert result.total.tokens_per_word == tokens / words
    assert result.intervals["bits_per_token"] == pytest.approx([bits, bits], abs=1e-6)
    assert [s.tokens for s in result.documents] == [14, 6, 1]
    curve = result.cumulative
    assert curve.positions.tolist() == list(range(1, 15))
    assert curve.documents.tolist() == [3] + [2] * 5 + [1] * 8
    assert curve.bits_per_token == pytest.approx([bits] * 14, abs=1e-6)


def test_known_losses_give_known_measures() -> None:
    first, second = Score("a", bits=12.0, tokens=4, bytes=8, words=2), Score("b", bits=6.0, tokens=2, bytes=4, words=1)
    assert (first.bits_per_token, first.bits_per_byte, first.word_perplexity) == (3.0, 1.5, 64.0)
    both = total([first, second], "both")
    assert (both.bits_per_token, both.bits_per_byte, both.word_perplexity) == (3.0, 1.5, 64.0)
    assert total([first, second], "both", words=9).word_perplexity == 4.0
    nothing = Score("c", bits=0.0, tokens=0, bytes=0, words=0)
    assert (nothing.bits_per_token, nothing.bits_per_byte, nothing.word_perplexity) == (None, None, None)
    assert Score("d", bits=1e6, tokens=1, bytes=1, words=1).word_perplexity == math.inf


def test_cumulative_curve_of_known_losses() -> None:
    """Document 0 costs 1, 3, 2 bits; document 1 costs 5 bits; document 2 costs 3, 1 bits."""
    curve = CumulativeCurve(np.array([3, 1, 2]))
    curve.add(0, 0, np.array([1.0, 3.0]))
    curve.add(1, 0, np.array([5.0]))
    curve.add(2, 0, np.array([3.0, 1.0]))
    curve.add(0, 2, np.array([2.0]))
    result = curve.curve()
    assert result.positions.tolist() == [1, 2, 3]
    assert result.bits_per_token.tolist() == [(1 + 5 + 3) / 3, (4 + 4) / (2 * 2), 6 / 3]
    assert result.documents.tolist() == [3, 2, 1]


def test_long_curves_are_thinned_but_exact_where_they_are() -> None:
    length = 20_000
    losses = np.random.default_rng(0).random(length)
    curve = CumulativeCurve(np.array([length, 5000]))
    for start in range(0, length, 777):
        curve.add(0, start, losses[start : start + 777])
    curve.add(1, 0, losses[:5000])
    result = curve.curve()
    assert len(result.positions) < 7000
    assert {1, 2, 4096, 5000, length} <= set(result.positions.tolist())
    means = np.cumsum(losses) / np.arange(1, length + 1)
    assert result.bits_per_token == pytest.approx(means[result.positions - 1])
    assert result.documents[result.positions == 5000] == 2
    assert result.documents[result.positions > 5000].max() == 1


def test_the_grid_of_no_documents_is_empty() -> None:
    assert len(grid_of(np.array([], np.int64))) == 0


def test_bootstrap_interval() -> None:
    """Documents that are all alike have no spread; two kinds of documents in equal shares have the known spread."""
    alike = [Score(str(i), bits=20.0, tokens=10, bytes=10, words=5) for i in range(30)]
    assert bootstrap(alike)["bits_per_token"] == [2.0, 2.0]
    mixed = [Score(str(i), bits=10.0 * (1 + i % 2), tokens=10, bytes=10, words=5) for i in range(400)]
    low, high = bootstrap(mixed)["bits_per_token"] or (0, 0)
    # The mean of 400 draws of 1 or 2 has deviation 0.5 / 20: the interval is 1.5 +- 1.96 * 0.025.
    assert (low, high) == pytest.approx((1.5 - 0.049, 1.5 + 0.049), abs=0.006)
    assert bootstrap(alike[:1]) == {"bits_per_token": None, "bits_per_byte": None, "word_perplexity": None}
    assert bootstrap(mixed) == bootstrap(mixed), "the same numbers give the same interval"


def test_published_words_are_used_for_pg19_alone(make_corpus: Callable[..., Corpus]) -> None:
    books = {f"{number}.txt": "a few words" for number in range(100)}
    assert published_words(make_corpus(books, name="pg19"), "test") == PG19_WORDS["test"] == 6_966_499
    others = make_corpus(books, name="other")
    assert published_words(others, "test") is None
    assert published_words(others, "test", "pg19") == 6_966_499
    assert published_words(make_corpus(dict(list(books.items())[:9]), name="pg-19-part"), "test") is None
    with pytest.raises(DataError, match="whole test split"):
        published_words(others, "validation", "pg19")


def test_published_words_change_perplexity_and_only_that(
    make_corpus: Callable[..., Corpus], make_reader: Callable[..., BlockRecurrentLM]
) -> None:
    corpus = make_corpus({f"{number}.txt": "two words" for number in range(100)}, name="pg19")
    model = make_reader()
    published = evaluate_split(model, corpus, "test")
    counted = evaluate_split(model, corpus, "test", EvalSettings(words="counted"))
    assert (published.total.words, counted.total.words) == (6_966_499, 200)
    assert published.total.word_perplexity == 2 ** (published.total.bits / 6_966_499)
    assert published.total.bits_per_token == counted.total.bits_per_token
    part = evaluate_split(model, corpus, "test", EvalSettings(names=("test/1.txt", "test/2.txt")))
    assert part.total.words == 4, "a part of the set has words of its own"

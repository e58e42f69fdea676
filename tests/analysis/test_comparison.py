"""Two readings of the same documents: differences, top tokens, distances, and where the gain comes from."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from block_recurrent import BlockRecurrentLM
from block_recurrent.analysis.comparison import (
    Comparison,
    DocumentPair,
    Reading,
    compare,
    find_top,
    gain_by_distance,
    where,
)
from block_recurrent.analysis.packing import pack_bits
from block_recurrent.analysis.token_text import TokenText
from block_recurrent.data import Corpus, load_tokenizer
from block_recurrent.evaluate.cumulative import Curve
from block_recurrent.evaluate.measures import Score
from block_recurrent.evaluate.state_edits import clear_every


def pair(content: str, better: dict[int, float], name: str = "a") -> DocumentPair:
    """A document on which A is better by so many bits at these bytes, and else as good as B."""
    tokenizer = load_tokenizer("bytes")
    text = TokenText(tokenizer.encode(content), tokenizer)
    bits_b = np.full(len(text), 8.0, np.float32)
    bits_a = bits_b.copy()
    for index, gain in better.items():
        bits_a[index] -= gain
    size = len(text)
    return DocumentPair(
        name, text, bits_a, bits_b, Score(name, bits_a.sum(), size, size, 1), Score(name, bits_b.sum(), size, size, 1)
    )


def test_top_tokens_in_order_with_distance_and_place() -> None:
    content = "Zoe " + "x " * 40 + "Zoe " + "y " * 3 + "Zoe q"
    first, second, third = 0, 84, 94
    documents = [pair(content, {second: 5.0, third: 3.0, first: 1.0, 50: -2.0, 52: -4.0}), pair("Zoe", {1: 4.0}, "b")]
    top = find_top(documents, 3, 1, window=16, segment=64)
    assert [(t.document, t.index, t.difference) for t in top] == [("a", second, 5.0), ("b", 1, 4.0), ("a", third, 3.0)]
    assert [t.distance for t in top] == [84, None, 10]
    assert [t.where for t in top] == ["beyond", "never", "window"]
    assert [t.word for t in top] == ["Zoe"] * 3
    assert all(t.proper_name for t in top)
    assert (top[0].bits_a, top[0].bits_b) == (3.0, 8.0)
    assert top[0].before.endswith("x x ")
    assert (top[0].token, top[0].after) == ("Z", "oe y y y Zoe q")
    worst = find_top(documents, 10, -1, window=16, segment=64)
    assert [(t.index, t.difference) for t in worst] == [(52, -4.0), (50, -2.0)], "only where B is better"


@pytest.mark.parametrize(
    ("index", "distance", "place"),
    [
        (100, -1, "never"),
        (100, 16, "window"),
        (100, 17, "segment"),
        (100, 37, "segment"),  # token 63 is read at position 64, which begins the segment of 100
        (100, 38, "beyond"),
        (64, 17, "beyond"),
    ],
)
def test_where_the_last_mention_lies(index: int, distance: int, place: str) -> None:
    assert where(index, distance, window=16, segment=64) == place


def test_gain_by_distance() -> None:
    content = "Zoe " + "x " * 40 + "Zoe"
    documents = (pair(content, {84: 6.0, 85: 3.0, 6: 1.0}),)
    curve = Curve(*(np.array([1]) for _ in range(3)))
    buckets = {b.label: b for b in gain_by_distance(Comparison("A", "B", 16, 64, documents, curve, curve, (), ()))}
    # Every x but the first was said 2 tokens before; the second Zoe is three tokens at distance 84.
    assert buckets["1-16"].tokens == 39
    assert buckets["1-16"].mean_difference == pytest.approx(1 / 39)
    assert buckets["65-256"].tokens == 3
    assert buckets["65-256"].mean_difference == pytest.approx(3.0)
    assert buckets["65-256"].share_of_gain == pytest.approx(0.9)
    assert buckets["17-64"].mean_difference is None
    assert buckets["never"].tokens == 4


def test_comparing_with_itself_finds_nothing(
    make_corpus: Callable[..., Corpus], make_reader: Callable[..., BlockRecurrentLM]
) -> None:
    corpus, model = make_corpus({"a.txt": "hello again " * 30}), make_reader()
    found = compare(Reading("A", model), Reading("B", model), corpus, "test", [0])
    assert found.top_a == found.top_b == ()
    assert found.total_a.bits == found.total_b.bits


def test_clearing_differs_only_after_the_first_segment(
    make_corpus: Callable[..., Corpus], make_reader: Callable[..., BlockRecurrentLM]
) -> None:
    corpus, model = make_corpus({"a.txt": "hello again " * 30, "b.txt": "short"}), make_reader()
    cleared = Reading("cleared", model, clear_every(model, 64))
    found = compare(Reading("normal", model), cleared, corpus, "test", [0, 1], top=500)
    assert min(t.index for t in found.top_a + found.top_b) >= 64
    assert len(found.top_a) + len(found.top_b) > 100
    assert found.documents[0].score_b.bits == pytest.approx(found.documents[0].bits_b.sum(), rel=1e-6)
    assert found.curve_a.documents[0] == 2


@pytest.mark.filterwarnings("error")
def test_losses_that_are_no_numbers_are_packed_without_a_warning() -> None:
    packed = pack_bits(np.array([np.nan, np.inf, 1.5, 100.0], np.float32))
    assert np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<u2").tolist() == [65535, 65535, 1500, 65535]

"""Headroom: caches and mixtures against hand-made cases and against a plain loop over tokens."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from block_recurrent import BlockRecurrentLM
from block_recurrent.cli.main import main
from block_recurrent.data import Corpus
from block_recurrent.evaluate.headroom import (
    CONTEXTS,
    DEFINITIONS,
    LAMBDAS,
    PRIOR,
    Headroom,
    headroom_of,
    measure_headroom,
    taken,
)
from block_recurrent.evaluate.scoring import score
from block_recurrent.evaluate.state_edits import clear_every

VOCABULARY = 2**12
UNIFORM = math.log2(VOCABULARY)


def costing(bits: float, *documents: Sequence[int]) -> Headroom:
    """Of a model that gives every token so many bits."""
    return headroom_of([np.array(d) for d in documents], [np.full(len(d), bits) for d in documents], 16, 48)


def named(headroom: Headroom) -> dict:
    return {band.label: band for band in (*headroom.bands(), *headroom.by_distance())}


def slow_headroom(documents: list[list[int]], bits: list[list[float]], low: int, high: float, kind: str) -> float:
    """One token after the other: predict it from what came before, then learn from it. Bits saved in all."""
    weights: dict[tuple[int, int], list[float]] = {}
    saved = 0.0
    for tokens, costs in zip(documents, bits, strict=True):
        did_last: dict[int, int] = {}
        for t, (token, cost) in enumerate(zip(tokens, costs, strict=True)):
            before = tokens[t - 1] if t else -1
            near = [i for i in range(t) if low < t - i <= high]
            followers = [tokens[i] for i in near if i and tokens[i - 1] == before]
            cache = Counter(followers if kind == "bigram" else [tokens[i] for i in near])
            context = (min(len(followers), 32).bit_length(), did_last.get(before, 0))
            share = cache[token] / cache.total() if cache else 0.0
            did_last[before] = 0 if not cache else 1 if share == 0 else 2 if share < 0.5 else 3
            if cache:
                w = weights.setdefault(context, list(PRIOR))
                ratios = [1 - x + x * share * 2**cost for x in LAMBDAS]
                mixed = sum(a * b for a, b in zip(w, ratios, strict=True))
                saved += math.log2(mixed)
                weights[context] = [a * b / mixed for a, b in zip(w, ratios, strict=True)]
    return saved


def test_it_is_what_a_loop_over_tokens_finds() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 6, n).tolist() for n in (150, 1, 70)] + [list(range(20)) * 4, []]
    bits = [rng.exponential(2.0, len(tokens)).tolist() for tokens in documents]
    found = named(headroom_of([np.array(d, np.uint16) for d in documents], map(np.array, bits), 8, 24))
    assert list(found)[:4] == ["all", "window", "reach", "beyond"]
    assert list(found)[4:] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256"]
    for band in found.values():
        high = math.inf if band.high is None else band.high
        for kind in ("unigram", "bigram"):
            slow = slow_headroom(documents, bits, band.low, high, kind) / 301
            assert getattr(band, kind) == pytest.approx(slow, abs=1e-5), (band.label, kind)


def test_a_sequence_said_again_beyond_the_window() -> None:
    """1,000 different tokens, four times: after the first time a bigram cache at distance 1,000 knows every token."""
    sequence = np.random.default_rng(0).permutation(VOCABULARY)[:1000].tolist()
    found = named(costing(UNIFORM, sequence * 4))
    # The first token comes after another than its first time: 2,999 tokens are known.
    assert found["beyond"].bigram_hits == 2999 / 4000
    assert found["beyond"].bigram == pytest.approx(UNIFORM * 2999 / 4000, abs=0.02)
    assert found["all"].bigram == pytest.approx(found["beyond"].bigram)
    assert found["513-1,024"].bigram == pytest.approx(UNIFORM * 2999 / 4000, abs=0.02)
    assert found["1,025-2,048"].bigram == pytest.approx(UNIFORM * 1999 / 4000, abs=0.02)
    assert found["window"].bigram == found["reach"].bigram == 0
    # A token has been said t // 1000 times, and the unigram cache beyond the reach of 48 has t - 48 tokens.
    shares = [t // 1000 / (t - 48) for t in range(1000, 4000)]
    assert found["beyond"].unigram == pytest.approx(sum(math.log2(VOCABULARY * x) for x in shares) / 4000, abs=0.02)


def test_one_context_by_hand() -> None:
    """Two tokens in turns: the bigram cache at distance 2 knows each token from index 3 on, and gives it 1."""
    found = named(costing(3.0, [5, 6] * 10))["2"]
    assert found.bigram_hits == 17 / 20
    # Two contexts: tokens 3 and 4, where the cache knew nothing the last time, and the 15 others, where it gave 1.
    ratios = 1 - LAMBDAS + LAMBDAS * 8
    saved = sum(math.log2(float(PRIOR @ ratios**count)) for count in (2, 15))
    assert found.bigram == pytest.approx(saved / 20, abs=1e-6)


def test_without_repeats_there_is_nothing_to_save() -> None:
    headroom = costing(UNIFORM, range(4000), range(4000, 4500))
    for band in named(headroom).values():
        assert band.bigram == 0
        assert 0 >= band.unigram * headroom.tokens >= -1, "one context, one bit"


def test_a_cache_that_is_no_help_costs_at_most_a_bit_per_context() -> None:
    """Random tokens of a model that knows that they are random."""
    tokens = np.random.default_rng(0).integers(0, 16, 20_000)
    headroom = costing(4.0, tokens)
    for band in named(headroom).values():
        for saved in (band.unigram, band.bigram):
            assert -CONTEXTS <= saved * headroom.tokens < 8


def test_a_model_that_knows_leaves_nothing() -> None:
    headroom = costing(0.0, list(range(50)) * 20)
    assert all(-CONTEXTS / headroom.tokens <= band.bigram <= 1e-9 for band in named(headroom).values())


def test_the_order_of_documents_makes_no_difference() -> None:
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 20, n).tolist() for n in (300, 40, 170)]
    one, other = costing(3.0, *documents), costing(3.0, *reversed(documents))
    for mine, theirs in zip(named(one).values(), named(other).values(), strict=True):
        assert (mine.unigram, mine.bigram) == pytest.approx((theirs.unigram, theirs.bigram), abs=1e-9)


@pytest.fixture
def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [np.tile(rng.integers(0, 256, n), 3).astype(np.uint16) for n in (90, 31, 1)]


def test_lanes_and_chunks_make_no_difference(
    make_reader: Callable[..., BlockRecurrentLM], texts: list[np.ndarray]
) -> None:
    model = make_reader()
    one = measure_headroom(model, texts, lanes=1)
    other = measure_headroom(model, texts, lanes=3, chunk=7)
    nats = [np.concatenate([p.nats for p in score(model, [text])]) for text in texts]
    whole = headroom_of(texts, [x / math.log(2) for x in nats], 16, 48)
    assert one.tokens == other.tokens == whole.tokens == sum(map(len, texts))
    for bands in zip(*(named(found).values() for found in (one, other, whole)), strict=True):
        assert bands[1].bigram == pytest.approx(bands[0].bigram, abs=1e-5)
        assert bands[2].bigram == pytest.approx(bands[0].bigram, abs=1e-5)


def test_nothing_beyond_the_reach_is_seen(make_reader: Callable[..., BlockRecurrentLM]) -> None:
    """Without a state, a pair of tokens is seen whole up to a distance of W x layers, its second token one further."""
    model = make_reader("slide")
    reach = model.config.window * model.config.num_layers
    text = np.random.default_rng(4).integers(0, 256, 400)
    changed = text.copy()
    changed[50] ^= 1
    nats = [np.concatenate([p.nats for p in score(model, [x])]) for x in (text, changed)]
    differs = np.flatnonzero(nats[0] != nats[1])
    assert differs.max() - 50 == reach + 1


def test_what_the_memory_has_taken(make_reader: Callable[..., BlockRecurrentLM], texts: list[np.ndarray]) -> None:
    model = make_reader()
    normal, cleared = (measure_headroom(model, texts, edit=edit) for edit in (None, clear_every(model, 64)))
    assert normal.bits_per_token != cleared.bits_per_token
    assert taken(normal, cleared)["bigram"] == cleared.beyond.bigram - normal.beyond.bigram
    assert cleared.beyond.label == "beyond"


TEXTS = {"one.txt": "It was the best of times. " * 9, "two.txt": "It was the worst of times, été\n" * 3, "x.txt": "y"}


@pytest.fixture
def command(make_corpus: Callable[..., Corpus], make_run: Callable[..., Path], make_reader: Callable) -> list[str]:
    return ["headroom", str(make_run(make_reader())), "--data", str(make_corpus(TEXTS).folder)]


def test_command(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json", str(tmp_path / "headroom.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "headroom.json").read_text())
    assert found["model"]["tokens"] == found["state_cleared"]["tokens"] == sum(len(t.encode()) for t in TEXTS.values())
    assert (found["model"]["window"], found["model"]["reach"], found["documents"]) == (16, 48, 3)
    for text in DEFINITIONS.values():
        assert text in printed
    beyond = [found[reading]["bands"][-1]["bigram"] for reading in ("model", "state_cleared")]
    assert found["taken"]["bigram"] == pytest.approx(beyond[1] - beyond[0])
    assert f"{beyond[0]:.4f}" in printed
    assert f"bigram {found['taken']['bigram']:.4f}" in printed


def test_command_on_some_tokens_as_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--max-tokens", "250", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["tokens"], found["documents"]) == (250, 2)


def test_command_without_a_state(
    make_corpus: Callable[..., Corpus],
    make_run: Callable[..., Path],
    make_reader: Callable[..., BlockRecurrentLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(make_reader("slide"), system="slide")
    assert main(["headroom", str(run), "--data", str(make_corpus(TEXTS).folder)]) == 0
    assert "cleared" not in capsys.readouterr().out.split("headroom:")[0]


def test_command_refuses(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--max-tokens", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert main([*command, "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err

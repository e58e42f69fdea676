"""Options mean what they mean in transformers; draws follow the distribution and hang on the seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent import Session
from block_recurrent.data import Tokenizer
from block_recurrent.errors import ConfigError
from block_recurrent.inference.sampling import Choice, Chooser, Sampling, choose, shape_logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: it must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 10**400}, "it must be a number of at least 0"),
        ({"length_penalty": 1e300}, r"length_penalty is 1e\+300: it must be a number from -10 to 10"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0: it must be a number above 0 and up to 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": -1}, "top_p is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"beams": 0}, "beams is 0"),
        ({"beams": 3, "top_p": 0.5}, "beam search does not sample"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"stop": 7}, "stop is 7"),
        ({"stop_at": "x"}, "unknown option 'stop_at' .did you mean 'stop'"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"end_at_mark": "no"}, "end_at_mark is 'no'"),
    ],
)
def test_bad_options_are_said(options: dict, message: str, make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling.of(**options)
    with pytest.raises(ConfigError, match=message):
        Session(make_reader(), byte_tokenizer).write(3, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 3),
    st.integers(0, 40),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
    st.floats(0.5, 2),
)
def test_logits_are_shaped_as_transformers_shapes_them(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    from transformers import generation as g

    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, 37, generator=random, dtype=torch.float64)
    recent = torch.randint(37, (1, 9), generator=random)
    theirs = g.RepetitionPenaltyLogitsProcessor(penalty)(recent, logits.clone())
    theirs = g.TemperatureLogitsWarper(temperature)(recent, theirs)
    if top_k:
        theirs = g.TopKLogitsWarper(top_k)(recent, theirs)
    theirs = g.TopPLogitsWarper(top_p)(recent, theirs)
    theirs = g.MinPLogitsWarper(min_p)(recent, theirs)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    ours = shape_logits(logits[0], recent[0].tolist(), sampling, eos_token_id=36)
    assert torch.equal(ours.isinf(), theirs[0].isinf())
    assert torch.allclose(ours.softmax(-1), theirs[0].softmax(-1), atol=1e-12)


def one(sampling: Sampling, logits: torch.Tensor) -> Choice:
    return choose([Chooser(sampling, eos_token_id=3)], logits[None], [[]])[0]


@pytest.mark.parametrize("vocabulary", [11, 257, 9000])
def test_a_row_among_others_is_chosen_as_it_would_be_alone(vocabulary: int) -> None:
    options: list[dict] = [
        {}, {"temperature": 0.7}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 1.3},
        {"end_at_mark": False}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"repetition_penalty": 2, "top_k": 9},
    ]  # fmt: skip
    samplings = [Sampling(seed=seed, **options[seed % len(options)]) for seed in range(16)]
    logits = 3 * torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(0))
    recent = [list(range(seed % 11)) for seed in range(16)]
    together = choose([Chooser(sampling, 3) for sampling in samplings], logits, recent)
    alone = [
        choose([Chooser(sampling, 3)], row[None], [last])[0]
        for sampling, row, last in zip(samplings, logits, recent, strict=True)
    ]
    assert together == alone
    assert len({choice.token for choice in alone}) > 5


@pytest.mark.parametrize("temperature", [5e-324, 1e-300])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    assert one(Sampling(temperature=temperature), torch.tensor([0.1, -3.0, 7.0, 6.9])).token == 2


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = Counter(one(Sampling(seed=seed), probabilities.log()).token for seed in range(4000))
    assert drawn[1] == 0, "what has no probability never comes"
    for token, p in enumerate(probabilities.tolist()):
        assert abs(drawn[token] / 4000 - p) < 0.04


def test_log_probabilities_are_the_models_own(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.read("Call me Ishmael. ")
    start = session.fork()
    written = list(session.write_tokens(20, temperature=0.7, top_k=50, repetition_penalty=1.3, end_at_mark=False))
    bits = start.loss_of([part.token for part in written])
    assert -sum(part.log_prob for part in written) / torch.tensor(2.0).log().item() == pytest.approx(bits, rel=1e-4)


def test_the_same_seed_gives_the_same_text_and_another_another(
    make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.read("Once upon a time")
    texts = [session.fork().write_all(30, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_of_one_is_greedy(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.read("Once upon a time")
    one = {"repetition_penalty": 5.0, "end_at_mark": False}
    greedy = session.fork().write_all(20, temperature=0, **one).tokens
    assert session.fork().write_all(20, top_k=1, **one).tokens == greedy
    assert session.fork().write_all(20, top_p=1e-9, **one).tokens == greedy
    assert session.fork().write_all(20, min_p=1.0, **one).tokens == greedy

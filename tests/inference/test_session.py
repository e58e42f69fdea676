"""Reading and writing in any pieces is the same as at once; forks are independent; losses are the model's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM, Session
from block_recurrent.data import Tokenizer
from block_recurrent.errors import BlockRecurrentError, ConfigError, DataError, InputError
from block_recurrent.presets import SYSTEMS

# A penalty makes greedy text of an untrained model wander instead of repeating one token.
GREEDY = {"temperature": 0, "repetition_penalty": 8.0, "end_at_mark": False}


def continuation(session: Session, tokens: int = 40) -> list[int]:
    return [written.token for written in session.fork().write_tokens(tokens, **GREEDY)]


def in_random_pieces(session: Session, text: str, seed: int) -> None:
    rng, start = random.Random(seed), 0
    while start < len(text):
        size = rng.choice([1, 2, 7, 30, 300])
        session.read(text[start : start + size])
        start += size


def check_every_way(model: BlockRecurrentLM, tokenizer: Tokenizer, text: str, folder: Path, tokens: int = 40) -> None:
    """Greedy text after reading whole, in pieces, over a save and load in the middle, and after a fork."""
    whole = Session(model, tokenizer)
    whole.read(text)
    whole.flush()
    expected = continuation(whole, tokens)
    assert len(set(expected)) > 3, "the text must be one that could differ"

    pieces = Session(model, tokenizer)
    in_random_pieces(pieces, text, seed=1)
    fork = pieces.fork()
    pieces.flush()
    assert pieces.position == whole.position
    assert pieces.memory.equals(whole.memory, tolerance=1e-4)
    assert continuation(pieces, tokens) == expected

    cut = random.Random(2).randrange(len(text))
    first = Session(model, tokenizer)
    first.read(text[:cut])
    first.save(folder / "half.memory")
    second = Session.load(folder / "half.memory", model, tokenizer)
    second.read(text[cut:])
    assert continuation(second, tokens) == expected
    assert second.fork().save(folder / "a.memory") is None

    assert continuation(fork, tokens) == expected
    fork.read("something else entirely")
    assert continuation(second, tokens) == expected, "a fork's reading is its own"


@pytest.mark.parametrize("system", SYSTEMS)
def test_any_cut_is_the_same(
    system: str, make_reader: Callable[..., BlockRecurrentLM], byte_tokenizer: Tokenizer, text: Callable, tmp_path: Path
) -> None:
    check_every_way(make_reader(system), byte_tokenizer, text(120), tmp_path)


@pytest.mark.parametrize("vocabulary", ["subwords", "prefixed_subwords"])
def test_any_cut_of_text_is_the_same_with_subwords(
    vocabulary: str,
    make_reader: Callable[..., BlockRecurrentLM],
    request: pytest.FixtureRequest,
    text: Callable,
    tmp_path: Path,
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(vocabulary)
    model = make_reader("rec-lstm-dual", vocab_size=tokenizer.vocab_size)
    check_every_way(model, tokenizer, text(300), tmp_path)
    whole, pieces = Session(model, tokenizer), Session(model, tokenizer)
    whole.read(tokenizer.encode(text(300)))
    in_random_pieces(pieces, text(300), seed=3)
    pieces.flush()
    assert pieces.state.recent == whole.state.recent, "pieces of text give the tokens of the whole text"


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_long_book_is_the_same_at_any_cut(
    system: str, make_reader: Callable[..., BlockRecurrentLM], byte_tokenizer: Tokenizer, text: Callable, tmp_path: Path
) -> None:
    book = text(17_000)
    assert len(book.encode()) > 100_000
    check_every_way(make_reader(system), byte_tokenizer, book, tmp_path, tokens=100)


@pytest.mark.parametrize("system", ["rec-fixed-skip", "feedback-lstm-single", "memorizing", "xl"])
def test_reading_writing_and_reading_equals_reading_it_all(
    system: str, make_reader: Callable[..., BlockRecurrentLM], byte_tokenizer: Tokenizer, text: Callable
) -> None:
    model = make_reader(system)
    mixed = Session(model, byte_tokenizer)
    mixed.read(text(20))
    written = [part.token for part in mixed.write_tokens(37, **GREEDY)]
    mixed.read(text(5, seed=1))
    whole = Session(model, byte_tokenizer)
    whole.read([*byte_tokenizer.encode(text(20)), *written, *byte_tokenizer.encode(text(5, seed=1))])
    assert mixed.position == whole.position
    assert mixed.memory.equals(whole.memory, tolerance=1e-4)
    assert continuation(mixed) == continuation(whole)


def test_a_session_says_what_the_model_says(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    """Against the model itself: the mark first, then the text, all in one call."""
    model = make_reader("rec-lstm-single")
    tokens = byte_tokenizer.encode("It was a dark and stormy night; the rain fell in torrents").tolist()
    session = Session(model, byte_tokenizer)
    session.read(tokens)
    with torch.no_grad():
        logits, memory = model(torch.tensor([[byte_tokenizer.eos_token_id, *tokens]]))
    written = next(session.write_tokens(1, temperature=0, end_at_mark=False))
    logits[0, -1, byte_tokenizer.eos_token_id] = -torch.inf
    assert written.token == int(logits[0, -1].argmax())
    assert session.memory.equals(memory, tolerance=1e-5)
    assert session.position == len(tokens) + 1


def test_loss_of_is_the_models_loss(make_reader: Callable, byte_tokenizer: Tokenizer, text: Callable) -> None:
    model = make_reader("rec-fixed-dual")
    before, after = text(60), text(40, seed=5)
    session = Session(model, byte_tokenizer)
    session.read(before)
    bits = session.loss_of(after)
    tokens = byte_tokenizer.encode(before + after).tolist()
    inputs = torch.tensor([[byte_tokenizer.eos_token_id, *tokens[:-1]]])
    with torch.no_grad():
        per_token = model.loss(inputs, torch.tensor([tokens])).per_token[0]
    expected = per_token[len(before.encode()) :].double().sum().item() / math.log(2)
    assert bits == pytest.approx(expected, rel=1e-5)
    assert session.position == len(before.encode()), "scoring does not move the session"
    assert session.loss_of("") == 0
    first = Session(model, byte_tokenizer).loss_of(before) + bits
    assert first == pytest.approx(Session(model, byte_tokenizer).loss_of(before + after), rel=1e-5)


def test_the_first_token_is_predicted_too(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = make_reader()
    session = Session(model, byte_tokenizer)
    with torch.no_grad():
        logits, _ = model(torch.tensor([[byte_tokenizer.eos_token_id]]))
    expected = -logits[0, 0].double().log_softmax(-1)[ord("Q")].item() / math.log(2)
    assert session.loss_of("Q") == pytest.approx(expected, rel=1e-5)


def test_text_that_is_not_settled_is_held_back(make_reader: Callable, subwords: Tokenizer) -> None:
    session = Session(make_reader(vocab_size=subwords.vocab_size), subwords)
    session.read("the har")
    assert session.position == len(subwords.encode("the"))
    session.read("poon of")
    assert session.position == len(subwords.encode("the harpoon"))
    session.flush()
    assert session.position == len(subwords.encode("the harpoon of"))


def test_a_model_in_training_mode_is_used_without_dropout_and_left_in_it(
    make_reader: Callable, byte_tokenizer: Tokenizer, text: Callable
) -> None:
    model = make_reader()
    session = Session(model, byte_tokenizer)
    session.read(text(30))
    expected = continuation(session)
    model.train()
    again = Session(model, byte_tokenizer)
    again.read(text(30))
    assert continuation(again) == expected
    assert model.training


def test_forks_write_what_the_original_would(make_reader: Callable, byte_tokenizer: Tokenizer, text: Callable) -> None:
    """Three writers from one point, in turns: none disturbs another."""
    session = Session(make_reader("rec-fixed-skip"), byte_tokenizer)
    session.read(text(30))
    alone = continuation(session, 50)
    a, b = session.fork(), session.fork()
    b.read("X")
    writers = [s.write_tokens(50, **GREEDY) for s in (a, b, session)]
    turns = [[part.token for part in row] for row in zip(*writers, strict=True)]
    columns = list(zip(*turns, strict=True))
    assert list(columns[0]) == list(columns[2]) == alone
    assert list(columns[1]) != alone


def test_leaving_the_iterator_leaves_a_whole_session(
    make_reader: Callable, byte_tokenizer: Tokenizer, text: Callable
) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.read(text(10))
    expected = continuation(session, 30)
    for count, _ in enumerate(session.write_tokens(30, **GREEDY), start=1):
        if count == 11:
            break
    # The penalty sees the same tokens, so the rest is what it would have been.
    assert [part.token for part in session.write_tokens(19, **GREEDY)] == expected[11:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([5, 256], "contain the document mark 256"),
        ([5, 257], "token 257 is out of range"),
        ([-1], "token -1 is out of range"),
        (b"bytes", "decode it to str first"),
        (np.array([[1, 2]]), "flat list"),
        ([0.5], "flat list"),
    ],
)
def test_what_can_not_be_read_is_said(
    given: object, message: str, make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    session = Session(make_reader(), byte_tokenizer)
    with pytest.raises(BlockRecurrentError, match=message):
        session.read(given)  # type: ignore[arg-type]
    assert session.position == 0


@pytest.mark.parametrize("count", [0, -3, 2.5, True, None])
def test_how_many_tokens_must_be_a_number_above_zero(
    count: object, make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens is .*at least 1"):
        Session(make_reader(), byte_tokenizer).write(count)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_size_is_refused(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="257 pieces with the document mark, the model 23"):
        Session(make_reader(vocab_size=23), byte_tokenizer)


def test_reading_an_empty_text_changes_nothing(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader(), byte_tokenizer)
    assert session.read("") == 0
    assert session.read([]) == 0
    assert session.position == 0
    assert len(continuation(session, 5)) == 5, "a document can be begun from nothing"


def test_a_model_with_damaged_weights_is_said(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = make_reader()
    model.final_norm.weight.data[0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        list(Session(model, byte_tokenizer).write(3))


def test_a_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    from block_recurrent.inference.text_input import read_text

    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin1"))
    with pytest.raises(DataError, match=r"is not UTF-8 .byte 0xE9.*iconv"):
        "".join(read_text(tmp_path / "latin.txt"))
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match="is UTF-16"):
        "".join(read_text(tmp_path / "wide.txt"))
    (tmp_path / "cut.txt").write_bytes("naïve"[:3].encode()[:-1])
    with pytest.raises(DataError, match="is not UTF-8"):
        "".join(read_text(tmp_path / "cut.txt"))
    with pytest.raises(DataError, match="can't be read"):
        "".join(read_text(tmp_path / "nothing.txt"))


@pytest.mark.parametrize("name", ["rec-fixed-skip", "memorizing", "feedback-fixed-skip"])
def test_training_goes_on_from_what_was_read(
    name: str, make_reader: Callable[..., BlockRecurrentLM], byte_tokenizer: Tokenizer
) -> None:
    model = make_reader(name)
    session = Session(model, byte_tokenizer)
    session.read("a text of more than one window, to have a state that was updated. " * 3)
    session.flush()
    tokens = torch.randint(100, (1, model.config.segment))
    loss = model.train().loss(tokens, tokens, session.memory)
    loss.sum.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

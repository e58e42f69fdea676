"""Streamed text has whole characters only, ends before stop strings, and ends at the mark."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent import Session
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.inference.text_stream import TextStream


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.integers(0, 19))
def test_characters_come_out_whole(text: str, cut: int) -> None:
    """Also when the text before the writing ends inside of a character."""
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text).tolist()
    before, after = tokens[: min(cut, len(tokens))], tokens[min(cut, len(tokens)) :]
    stream = TextStream(tokenizer, before, ())
    pieces = [stream.push(token) for token in after]
    written = "".join(pieces) + stream.finish()
    assert (bytes(before).decode("utf-8", "ignore") + written).encode() == bytes(tokens).decode().encode()
    assert "\ufffd" not in written.replace("\ufffd", "", text.count("\ufffd"))


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    tokenizer = load_tokenizer("bytes")
    stream = TextStream(tokenizer, [], stops)
    written = ""
    for token in tokenizer.encode(text).tolist():
        written += stream.push(token)
        if stream.stopped:
            break
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    assert stream.stopped == bool(ends)
    if not ends:
        assert written + stream.finish() == text
    else:
        # The stop that is complete first; of several, the one that begins first.
        seen = text[: min(ends)]
        begins = [place for stop in stops if (place := seen.find(stop)) >= 0]
        assert written == seen[: min(begins)]


def test_byte_fallback_streams_whole_characters(subwords: Tokenizer) -> None:
    tokens = subwords.encode("sea 🐳 日本 Ω ship").tolist()
    stream = TextStream(subwords, [], ())
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == "sea 🐳 日本 Ω ship"
    assert "" in pieces, "the whale is spelled in bytes"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_prefixed_vocabulary_has_no_space_at_the_very_beginning(prefixed_subwords: Tokenizer) -> None:
    tokens = prefixed_subwords.encode("the sea").tolist()
    stream = TextStream(prefixed_subwords, [], ())
    assert "".join(map(stream.push, tokens)) == "the sea"
    later = TextStream(prefixed_subwords, tokens, ())
    assert "".join(map(later.push, tokens)) == " the sea"


def test_writing_never_yields_a_broken_character(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    """A model of bytes writes broken UTF-8 of its own; what is shown is always valid text, and nothing is lost."""
    session = Session(make_reader(), byte_tokenizer)
    parts = list(session.fork().write_tokens(200, seed=3, end_at_mark=False))
    shown = "".join(session.write(200, seed=3, end_at_mark=False))
    raw = bytes(part.token for part in parts)
    assert raw.decode("utf-8", "replace").startswith(shown)
    assert len(raw.decode("utf-8", "replace")) - len(shown) <= 1, "at most an unfinished last character is kept back"


def steered(make_reader: Callable, tokens: list[int]) -> object:
    """A model whose next tokens are given: to test what follows from them."""

    class Steered(type(make_reader())):  # type: ignore[misc]
        def forward(self, given, memory=None, starts=None, lengths=None):  # type: ignore[no-untyped-def]
            position = int(memory.tokens_read[0])
            logits, memory = super().forward(given, memory, starts, lengths)
            logits[..., tokens[position % len(tokens)]] += 1e4
            return logits, memory

    return Steered(make_reader().config).eval()


def test_a_stop_string_across_tokens_ends_the_writing(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = steered(make_reader, list(b"good morning END of it. "))
    session = Session(model, byte_tokenizer)
    assert list(session.fork().write(100, stop=["END"])) == list("good morning ")
    written = session.write_all(100, stop=("ni", "END"))
    assert (written.text, written.ended) == ("good mor", "stop")
    assert session.position == len("good morni"), "the session has written the stop string, it is only not shown"
    assert session.write_all(5).text == "ng EN"
    held = Session(model, byte_tokenizer)
    assert "".join(held.write(15, stop="END!")) == "good morning EN", "what was held back comes out at the end"


def test_writing_ends_at_the_mark_unless_told_to_go_on(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model = steered(make_reader, [*b"The end.", byte_tokenizer.eos_token_id])
    session = Session(model, byte_tokenizer)
    assert "".join(session.write(100)) == "The end."
    assert session.position == 8, "the mark is no token of the text"
    again = session.write_all(100)
    assert (again.text, again.tokens, again.ended) == ("", (), "mark"), "it is still the end"
    session.read("More")
    whole = Session(model, byte_tokenizer)
    whole.read("The end.More")
    assert session.memory.equals(whole.memory, 1e-5), "reading goes on as if no mark had come"
    on = Session(model, byte_tokenizer)
    assert on.write_all(12, end_at_mark=False).ended == "length"
    parts = list(Session(model, byte_tokenizer).write_tokens(100, stop=["!"]))
    assert parts[-1].token == byte_tokenizer.eos_token_id
    assert "".join(part.text for part in parts) == "The end."


def test_a_character_cut_by_the_limit_is_finished_by_the_next_call(
    make_reader: Callable, byte_tokenizer: Tokenizer
) -> None:
    model = steered(make_reader, list("日本".encode()))
    session = Session(model, byte_tokenizer)
    assert ["".join(session.write(n)) for n in (1, 1, 1, 2, 1)] == ["", "", "日", "", "本"]


def test_memory_stays_the_same_size_while_writing(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader("rec-fixed-skip"), byte_tokenizer)
    list(session.write(20, end_at_mark=False))
    before = session.memory.nbytes
    list(session.write(200, end_at_mark=False))
    assert session.memory.nbytes == before
    assert isinstance(session.memory.tokens_read, torch.Tensor)


@pytest.mark.parametrize("length", [1, 513, 2000])
def test_what_is_kept_of_the_text_is_bounded(length: int, make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    session = Session(make_reader("slide"), byte_tokenizer)
    session.read([65] * length)
    assert len(session.state.recent) == min(length, 512)
    assert len(session.state.text.tail) < 256

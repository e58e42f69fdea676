"""Words and characters are those of Python's strings, wherever the text is cut."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from block_recurrent.data.utf8 import NOTHING, Counts, count

SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
texts = st.text() | st.text(st.sampled_from(SPACES + "abé漢\u2019\x1b\x08"))


@given(texts)
def test_words_and_characters_are_those_of_python(text: str) -> None:
    counts = count(text.encode())
    assert (counts.words, counts.characters) == (len(text.split()), len(text))


@given(st.lists(texts, max_size=6))
def test_pieces_add_up(pieces: list[str]) -> None:
    text = "".join(pieces)
    counts = reduce(Counts.then, [count(piece.encode()) for piece in pieces], NOTHING)
    assert (counts.words, counts.characters) == (len(text.split()), len(text))


def test_every_character_there_is() -> None:
    for begin in range(0, 0x110000, 0x1000):
        characters = [chr(code) for code in range(begin, begin + 0x1000) if not 0xD800 <= code < 0xE000]
        text = "".join(f"a{character}b{character} " for character in characters)
        assert count(text.encode()).words == len(text.split())

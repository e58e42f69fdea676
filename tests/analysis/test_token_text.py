"""Words of tokens, distances to the last mention, proper names, and excerpts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_recurrent.analysis.token_text import TokenText
from block_recurrent.data import Tokenizer, load_tokenizer

TEXT = "Ann saw Bob. “Été à Paris,” bob's wife said; ann… été 😀 Bob, the anniversary"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small SentencePiece vocabulary of the default kind: a space in front, several characters a piece."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "text.txt").write_text((TEXT + "\n") * 40, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "v"), vocab_size=60, minloglevel=2, model_type="bpe"
    )
    return load_tokenizer(folder / "v.model")


def of_bytes(text: str) -> TokenText:
    tokenizer = load_tokenizer("bytes")
    return TokenText(tokenizer.encode(text), tokenizer)


def test_distances_are_to_the_same_place_of_the_last_mention() -> None:
    text, raw = of_bytes(TEXT), TEXT.encode()
    assert text.text == TEXT
    place = raw.index(b"Bob, the")
    for offset in range(3):
        assert text.word(place + offset) == "Bob"
        assert text.distances[place + offset] == place - raw.index(b"bob's"), "without regard to case"
    summer = raw.index("été 😀".encode())
    assert text.distances[summer] == summer - raw.index("Été".encode()), "letters of several bytes"
    assert text.distances[raw.index(b"anniversary")] == -1, "a word that begins alike is another word"
    assert text.distances[raw.index(b"Ann")] == -1
    comma = raw.index(b", the")
    assert text.distances[comma] == comma - raw.index(b","), "what is no word counts as a word of its own"


def test_pieces_of_words(pieces: Tokenizer) -> None:
    text = TokenText(pieces.encode(TEXT), pieces)
    bobs = [i for i in range(len(text)) if text.word(i) == "Bob" and text.token(i).strip().startswith("B")]
    assert len(bobs) == 2
    # The lower-case mention lies between: the distance is to its first piece, whatever the pieces are.
    (lower,) = [i for i in range(len(text)) if text.word(i) == "bob" and text.word_of[i] != text.word_of[i - 1]]
    assert text.distances[bobs[1]] == bobs[1] - lower
    assert "".join(text.token(i) for i in range(len(text))) == text.between(0, len(text))


def test_proper_names() -> None:
    text = of_bytes("The cat met Tom. Then Tom ran. then the cat slept. However, no")
    names = {text.word(i) for i in np.flatnonzero(text.proper_names)}
    assert names == {"Tom", "However"}, "the rule is simple: 'The' and 'Then' occur in small letters too"


def test_excerpts_and_parts_of_characters() -> None:
    text = of_bytes("aé€b")
    assert text.excerpt(0, 100, 100) == ("", "a", "é€b")
    assert text.excerpt(6, 100, 100) == ("aé€", "b", "")
    assert text.token(1) == "\ufffd", "half a character"
    assert text.lengths_in_utf16().tolist() == [1, 1, 0, 1, 0, 0, 1]


def test_bytes_that_are_not_text() -> None:
    tokenizer = load_tokenizer("bytes")
    text = TokenText(np.frombuffer(b"ok \xff\xfe \xe2\x82 ok", np.uint8), tokenizer)
    assert text.distances[9] == 9
    assert text.lengths_in_utf16().sum() == len(text.text)


def test_nothing() -> None:
    text = of_bytes("")
    assert len(text) == len(text.distances) == len(text.proper_names) == len(text.lengths_in_utf16()) == 0


@given(st.text(alphabet="ab Aé€😀.\n", max_size=60))
def test_distances_against_a_plain_search(content: str) -> None:
    """Byte tokens: the distance is to the last earlier whole word that is the same, found by looking at all."""
    import re

    text, raw = of_bytes(content), content.encode()
    spans = [
        (len(content[: m.start()].encode()), m.group().casefold(), len(m.group().encode()))
        for m in re.finditer(r"[^\W_]+", content)
    ]
    for number, (begin, word, _) in enumerate(spans):
        earlier = [b for b, w, _ in spans[:number] if w == word]
        assert text.distances[begin] == (begin - earlier[-1] if earlier else -1)
    assert text.raw == raw
    assert text.lengths_in_utf16().sum() == len(content.encode("utf-16-le")) // 2

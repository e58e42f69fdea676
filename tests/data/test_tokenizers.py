"""Tokenizers: exact where they promise it, cut without a trace, and clear about what is no tokenizer."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent.data.sources.document import deal_split
from block_recurrent.data.tokenizers.base import ByteTokenizer, Tokenizer, load_tokenizer
from block_recurrent.data.tokenizers.training import train_tokenizer
from block_recurrent.data.utf8 import last_character_end
from block_recurrent.errors import DataError

NASTY = [
    "",
    " ",
    "\n",
    "a\r\nb\t\tc   d    e\n\n\n  x \n",
    "a\0b",
    "\ufeffwith a byte-order mark",
    "x\u2581y \u2581\u2581",  # SentencePiece's own sign for a space
    "<unk> <s> </s> <0x41> \u2047 \u2585",
    "\ufffd \U0010ffff \ufffe e\u0301 \u200b",
    "漢字 и кириллица 🙂🙂",
    "\x85\xa0\u3000\u2028",
]
texts = st.text() | st.text(st.sampled_from(" \n\t▁abcé漢<>0x41")) | st.sampled_from(NASTY)


@given(texts)
@settings(deadline=None, max_examples=300)
def test_bytes_give_any_text_back(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.tolist() == list(text.encode())
    assert ByteTokenizer().decode(tokens) == text


@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_our_own_vocabulary_gives_any_text_back(own: Tokenizer, text: str) -> None:
    tokens = own.encode(text)
    assert own.decode(tokens) == text
    assert tokens.max(initial=0) < own.size


@given(text=texts, size=st.integers(4, 40))
@settings(deadline=None, max_examples=300)
def test_cutting_into_pieces_changes_no_token_of_our_own_vocabulary(own: Tokenizer, text: str, size: int) -> None:
    text = f"{text} and {text}\nthen {text}" * 3
    whole = own.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "piece_bytes", size + 40)
        pieces = list(own.cut([text.encode()]))
        in_pieces = own.encode(text)
    assert b"".join(pieces) == text.encode()
    # Where a whole piece has no safe place it is cut all the same, and the text still comes back.
    assert own.decode(in_pieces) == text
    if all(re.search(rb"[!-~]$", one) and two[:1] in b" \n" for one, two in itertools.pairwise(pieces)):
        assert in_pieces.tolist() == whole.tolist()


def test_pieces_do_not_depend_on_the_chunks_they_come_in(own: Tokenizer) -> None:
    raw = ("Ein Satz über Bücher, und noch einer.\n" * 40_000).encode()
    whole = list(own.cut([raw]))
    assert len(whole) > 2
    assert max(map(len, whole)) <= own.piece_bytes
    for size in (1000, 65_536, 1_000_000):
        assert list(own.cut(raw[i : i + size] for i in range(0, len(raw), size))) == whole


def test_the_authors_vocabulary_in_pieces_equals_sentencepiece_on_the_whole_book(
    authors: Tokenizer, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=authors.model)
    text = (books / "test" / "george-bernard-shaw--pygmalion.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(authors, "piece_bytes", 5000)
    tokens = authors.encode(text)
    whole = processor.encode(text)
    assert tokens.tolist() == whole
    assert authors.decode(tokens) == processor.decode(whole)


@given(text=st.text(st.sampled_from(" \n\tab.é漢\u200b\xa0▁")))
@settings(deadline=None, max_examples=100)
def test_the_authors_vocabulary_in_units_equals_sentencepiece_on_any_text(authors: Tokenizer, text: str) -> None:
    processor = authors._processor  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(authors), "UNIT_CHARACTERS", 2)
        tokens = authors.encode(text)
    assert tokens.tolist() == processor.encode(text)
    assert authors.decode(tokens) == processor.decode(tokens.tolist())


def test_what_the_authors_vocabulary_loses_is_counted(authors: Tokenizer) -> None:
    encoded = authors.encode_piece(b"one\ntwo\tthree", begin=True)
    assert (encoded.exact, encoded.lost, encoded.unknown) == (False, 2, 0)
    encoded = authors.encode_piece("plain words 漢字".encode(), begin=True)
    assert (encoded.exact, encoded.lost, encoded.unknown) == (False, 2, 1)
    encoded = authors.encode_piece(b"plain words", begin=True)
    assert (encoded.exact, encoded.lost, encoded.unknown) == (True, 0, 0)


def test_a_long_text_without_any_white_space_is_encoded_in_linear_time_and_comes_back(own: Tokenizer) -> None:
    text = "abcdefgh" * 150_000
    assert own.decode(own.encode(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "own", "authors"])
def test_the_interface(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    assert tokenizer.eos_token_id == tokenizer.size
    assert tokenizer.vocab_size == tokenizer.size + 1
    tokens = tokenizer.encode("some words of text")
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == "some words of text"
    assert tokenizer.decode_bytes(tokens) == b"some words of text"
    assert tokenizer.decode([*tokens.tolist(), tokenizer.eos_token_id]) == "some words of text"
    assert tokenizer.decode([]) == ""
    for bad in ([tokenizer.size + 1], [-1]):
        with pytest.raises(DataError, match=f"token {bad[0]} is out of range"):
            tokenizer.decode(bad)
    with pytest.raises(DataError, match="flat list of integers"):
        tokenizer.decode([0.5])


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("content", [b"", b"just some text\n", bytes(range(256)) * 20])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"no\.model' is not a SentencePiece file; give one, or 'bytes'"):
        load_tokenizer(path)


def test_a_cut_tokenizer_file(tmp_path: Path, own: Tokenizer) -> None:
    assert own.model is not None
    for length in (1, 100, len(own.model) // 2, len(own.model) - 1):
        path = tmp_path / "cut.model"
        path.write_bytes(own.model[:length])
        with pytest.raises(DataError, match="is not a SentencePiece file"):
            load_tokenizer(path)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokenizer file 'byte' does not exist; give a SentencePiece file, 'bytes', or"):
        load_tokenizer("byte")
    with pytest.raises(DataError, match="can't read the tokenizer file"):
        load_tokenizer(tmp_path)


@given(st.text(max_size=20), st.integers(1, 30))
def test_the_end_of_the_last_whole_character(text: str, length: int) -> None:
    raw = (text + "é漢🙂a" * 10).encode()
    end = last_character_end(raw[:length])
    assert length - 3 <= end <= length
    assert raw[:end].decode() == raw[:length].decode("utf-8", "ignore")


@pytest.mark.parametrize("size", [511, 131_073])
def test_sizes_that_can_not_be_trained(size: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"--vocab-size must be 512 to 131072, not {size}"):
        train_tokenizer([str(tmp_path)], size)


def test_too_little_text_for_the_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too little text")
    with pytest.raises(
        DataError, match=r"can't train a vocabulary of 5000 pieces: this text allows at most \d+; use more"
    ):
        train_tokenizer([str(tmp_path / "a.txt")], 5000)


def test_no_text_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training text found in"):
        train_tokenizer([str(tmp_path)], 1000)


def test_training_uses_the_training_documents_only_and_has_the_size_asked_for(tmp_path: Path) -> None:
    for split, word in (("train", "walrus "), ("test", "xylophone ")):
        (tmp_path / split).mkdir()
        numbered = "".join(f"{word}{number} ".replace("0", "o") for number in range(4000))
        (tmp_path / split / "a.txt").write_text(numbered)
    tokenizer = train_tokenizer([str(tmp_path)], 600)
    assert tokenizer.size == 600
    assert len(tokenizer.encode(" walrus")) == 1
    assert len(tokenizer.encode(" xylophone")) > 3


def test_held_out_documents_of_any_share_are_not_trained_on(tmp_path: Path) -> None:
    files = [f"{number}.txt" for number in range(99) if deal_split(f"{number}.txt", 0.05, 0.05) == "train"]
    trained = next(name for name in files if deal_split(name, 0.3, 0.3) == "train")
    held_out = next(name for name in files if deal_split(name, 0.3, 0.3) != "train")
    for name, word in ((trained, "walrus "), (held_out, "xylophone ")):
        (tmp_path / name).write_text("".join(f"{word}{number} ".replace("0", "o") for number in range(4000)))
    tokenizer = train_tokenizer([str(tmp_path)], 600, validation=0.3, test=0.3)
    assert len(tokenizer.encode(" walrus")) == 1
    assert len(tokenizer.encode(" xylophone")) > 3
    with pytest.raises(DataError, match="the share --test must be 0 to 1, not 2"):
        train_tokenizer([str(tmp_path)], 600, test=2)


def test_a_large_alphabet_fits_a_small_vocabulary(tmp_path: Path) -> None:
    words = "".join(f"word{number} of {number * number}\n" for number in range(2000))
    chinese = "".join(chr(0x4E00 + number % 3000) for number in range(9000))
    (tmp_path / "a.txt").write_text(words + chinese, encoding="utf-8")
    tokenizer = train_tokenizer([str(tmp_path / "a.txt")], 512)
    assert tokenizer.size == 512
    assert tokenizer.decode(tokenizer.encode(chinese)) == chinese

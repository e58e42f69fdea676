"""Memory files: whole, small, of one size, and only for the model that made them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_recurrent import Session
from block_recurrent.data import Tokenizer
from block_recurrent.errors import FileFormatError, MemoryMismatchError
from block_recurrent.inference.memory_diff import difference
from block_recurrent.inference.session_file import describe, read_memory_file
from block_recurrent.inference.text_hash import TextHash


def test_everything_comes_back(make_reader: Callable, subwords: Tokenizer, tmp_path: Path, text: Callable) -> None:
    model = make_reader("rec-lstm-skip", vocab_size=subwords.vocab_size)
    session = Session(model, subwords, name="my model")
    session.read(text(80) + "unfin")
    session.save(tmp_path / "a.memory")
    loaded = Session.load(tmp_path / "a.memory", model, subwords)
    assert loaded.memory.equals(session.memory)
    assert loaded.state.held == b" unfin"
    assert (loaded.state.pending, loaded.state.recent) == (session.state.pending, session.state.recent)
    assert loaded.state.text == session.state.text
    assert read_memory_file(tmp_path / "a.memory").model_name == "my model"
    options = {"seed": 3, "repetition_penalty": 2.0}
    assert loaded.write_all(30, **options) == session.write_all(30, **options)


@pytest.mark.parametrize("system", ["rec-fixed-skip", "memorizing", "xl"])
def test_the_size_does_not_hang_on_what_was_read(
    system: str, make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    session = Session(make_reader(system), byte_tokenizer)
    sizes = set()
    for count in (1, 15, 1000, 3000, 1):
        session.read([65] * count)
        session.save(tmp_path / "a.memory")
        sizes.add((tmp_path / "a.memory").stat().st_size)
    assert len(sizes) == 1


@pytest.mark.slow
def test_a_large_models_file_is_as_large_after_a_million_tokens(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """160m, rec-fixed-skip. Reading a million tokens takes hours on a CPU, so the count is set by hand: the tensors'
    shapes don't depend on it, and the header has room for it."""
    from dataclasses import replace

    from block_recurrent import BlockRecurrentLM, preset

    session = Session(BlockRecurrentLM(preset("rec-fixed-skip", "160m", vocab_size=257)).eval(), byte_tokenizer)
    session.read([65] * 1000)
    session.save(tmp_path / "thousand.memory")
    memory = replace(session.memory, tokens_read=torch.tensor([1_000_000]))
    session.state = replace(session.state, memory=memory, recent=(255,) * 512)
    session.save(tmp_path / "million.memory")
    sizes = [(tmp_path / name).stat().st_size for name in ("thousand.memory", "million.memory")]
    assert sizes[0] == sizes[1]


def test_another_models_memory_is_refused_with_both_names(
    make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    mine, other = make_reader(seed=0), make_reader(seed=1)
    Session(mine, byte_tokenizer, name="runs/mine, step 3").save(tmp_path / "a.memory")
    with pytest.raises(MemoryMismatchError, match=r"'runs/mine, step 3' .*not to 'runs/other, step 9'"):
        Session.load(tmp_path / "a.memory", other, byte_tokenizer, name="runs/other, step 9")
    wider = make_reader(mlp_dim=200)
    with pytest.raises(MemoryMismatchError, match="belongs to model 'runs/mine, step 3'"):
        Session.load(tmp_path / "a.memory", wider, byte_tokenizer)


def test_another_tokenizers_memory_is_refused(
    make_reader: Callable, subwords: Tokenizer, prefixed_subwords: Tokenizer, tmp_path: Path
) -> None:
    model = make_reader(vocab_size=subwords.vocab_size)
    session = Session(model, subwords)
    session.save(tmp_path / "a.memory")

    class Renamed(type(subwords)):  # type: ignore[misc]
        sha256 = prefixed_subwords.sha256

    other = Renamed(subwords.model)
    other.sha256 = prefixed_subwords.sha256
    with pytest.raises(MemoryMismatchError, match="was made with tokenizer"):
        Session.load(tmp_path / "a.memory", model, other)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "missing", "folder"])
def test_a_damaged_file_is_refused(
    damage: str, make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, path = make_reader(), tmp_path / "a.memory"
    session = Session(model, byte_tokenizer)
    session.read("some text")
    session.save(path)
    raw = path.read_bytes()
    if damage in ("missing", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    else:
        flipped = raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:]
        path.write_bytes({"cut": raw[:-7], "flipped": flipped, "empty": b"", "text": b"Call me Ishmael" * 9}[damage])
    with pytest.raises(FileFormatError) as caught:
        Session.load(path, model, byte_tokenizer)
    assert "a.memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_memory_without_a_session_is_said(make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_reader()
    _, memory = model(torch.tensor([[1, 2, 3]]))
    memory.save(tmp_path / "plain.memory")
    with pytest.raises(FileFormatError, match="not of a session"):
        Session.load(tmp_path / "plain.memory", model, byte_tokenizer)


def test_a_failed_save_leaves_the_old_file(
    make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(make_reader(), byte_tokenizer)
    session.save(tmp_path / "a.memory")
    old = (tmp_path / "a.memory").read_bytes()
    session.read("more")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileFormatError, match="No space left"):
        session.save(tmp_path / "a.memory")
    assert (tmp_path / "a.memory").read_bytes() == old
    assert list(tmp_path.iterdir()) == [tmp_path / "a.memory"], "nothing is left beside it"


def test_a_book_is_not_replaced_by_a_memory(make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael." * 50)
    session = Session(make_reader(), byte_tokenizer)
    with pytest.raises(FileFormatError, match="is not a memory file: choose another name"):
        session.save(tmp_path / "book.txt")
    assert (tmp_path / "book.txt").read_text().startswith("Call me")
    with pytest.raises(FileFormatError, match="there is no folder"):
        session.save(tmp_path / "nowhere" / "a.memory")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=700), max_size=6), st.lists(st.binary(max_size=700), max_size=6))
def test_the_hash_is_of_the_text_not_of_its_pieces(a: list[bytes], b: list[bytes]) -> None:
    def hash_of(pieces: list[bytes]) -> str:
        found = TextHash()
        for piece in pieces:
            found = TextHash.from_dict(found.update(piece).to_dict())
        return found.hexdigest()

    assert hash_of(a) == TextHash().update(b"".join(a)).hexdigest()
    assert (hash_of(a) == hash_of(b)) == (b"".join(a) == b"".join(b))


def test_info_and_difference(make_reader: Callable, byte_tokenizer: Tokenizer, tmp_path: Path, text: Callable) -> None:
    model = make_reader("rec-fixed-skip")
    session = Session(model, byte_tokenizer, name="runs/x, step 1")
    session.read(text(30))
    session.save(tmp_path / "a.memory")
    session.read("and more")
    session.save(tmp_path / "b.memory")
    a, b = (read_memory_file(tmp_path / name) for name in ("a.memory", "b.memory"))
    facts = describe(a)
    size = len(text(30).encode())
    assert facts["tokens"] == facts["text_bytes"] == size
    assert facts["model"] == "runs/x, step 1"
    assert facts["open_block"] == f"{size % 16} of 16 tokens"
    assert facts["text_hash"] == TextHash().update(text(30).encode()).hexdigest()
    assert all(row.largest == 0 and row.relative == 0 and row.cosine == pytest.approx(1) for row in difference(a, a))
    rows = difference(a, b)
    assert {(row.layer, row.what) for row in rows} == {
        *((layer, what) for layer in (1, 2, 3) for what in ("keys", "values")),
        (2, "state"),
    }
    keys = next(row for row in rows if (row.layer, row.what) == (1, "keys"))
    gap = a.state.memory.layers[0].keys - b.state.memory.layers[0].keys
    assert keys.largest == pytest.approx(gap.abs().max().item())
    assert keys.relative > 0.01
    Session(make_reader(seed=1), byte_tokenizer).save(tmp_path / "c.memory")
    with pytest.raises(MemoryMismatchError, match="different models"):
        difference(a, read_memory_file(tmp_path / "c.memory"))

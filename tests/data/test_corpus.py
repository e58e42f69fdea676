"""A prepared folder that doesn't match its manifest is refused, or found out by verify."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block_recurrent.data import Corpus, LaneStream
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.data.corpus.report import problems, summarize
from block_recurrent.data.tokenizers.base import ByteTokenizer, Tokenizer
from block_recurrent.errors import DataError, FileFormatError
from block_recurrent.io.door import seal_json

FILES = {"train/a.txt": b"one two", "train/b.txt": b"three", "test/c.txt": "vier fünf".encode()}


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus(FILES)


def change_manifest(corpus: Corpus, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    manifest = json.loads((corpus.folder / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    old = manifest.pop("sha256")
    text = seal_json(json.dumps(manifest)) if sealed else json.dumps({**manifest, "sha256": old})
    (corpus.folder / "manifest.json").write_text(text, encoding="utf-8")


def test_reading(corpus: Corpus) -> None:
    assert (corpus.eos_token_id, corpus.vocab_size, corpus.dtype) == (256, 257, np.uint16)
    assert corpus.lengths("train").tolist() == [7, 5]
    assert corpus.tokens("train", 1).tobytes() == b"t\0h\0r\0e\0e\0"
    assert corpus.find("test/c.txt") == ("test", 0)
    assert corpus.text("test/c.txt") == "vier fünf"
    assert corpus.documents("validation") == []
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens("train", 0)[0] = 1
    assert list(problems(corpus)) == []


def test_names_and_splits_that_are_not_there(corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"has no document 'train/a.tx' \(did you mean 'train/a.txt'\?\)"):
        corpus.text("train/a.tx")
    with pytest.raises(DataError, match=r"unknown split 'valid' \(did you mean 'validation'\?\)"):
        corpus.documents("valid")


def test_a_large_vocabulary_is_stored_in_four_bytes(
    tmp_path: Path, own: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(type(own), "vocab_size", 70_000)
    corpus = prepare(PrepareSettings((str(tmp_path / "a.txt"),)), own, tmp_path / "out")
    assert corpus.dtype == np.uint32
    assert corpus.text("a.txt") == "some text"


def test_the_fingerprint_is_that_of_the_documents_and_the_tokenizer(
    make_corpus: Callable[..., Corpus], own: Tokenizer
) -> None:
    first = make_corpus(FILES).fingerprint
    assert make_corpus(FILES, overwrite=True).fingerprint == first
    assert make_corpus(FILES, own, overwrite=True).fingerprint != first
    assert make_corpus({"train/a.txt": b"One two"}, overwrite=True).fingerprint != first


def test_a_folder_that_is_none_of_ours(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"is not prepared data: it has no manifest.json; create it with 'brt data"):
            Corpus(folder)
    (tmp_path / "manifest.json").write_text('{"some": "other program"}')
    with pytest.raises(FileFormatError, match="is not the manifest of a block-recurrent corpus"):
        Corpus(tmp_path)
    (tmp_path / "manifest.json").write_text('{"cut')
    with pytest.raises(FileFormatError, match="is damaged"):
        Corpus(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(FileFormatError, match="is damaged"):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=99), "has format version 99; this version supports up to 2"),
        (lambda m: m.pop("documents"), "lacks 'documents'"),
        (lambda m: m.pop("tokenizer"), "lacks 'tokenizer'"),
        (lambda m: m.update(dtype="nonsense"), "is damaged"),
        (lambda m: m["documents"][0].pop("tokens"), "is damaged"),
        (lambda m: m["documents"][0].update(split="nowhere"), "is damaged"),
        (lambda m: m["documents"][0].update(extra=1), "is damaged"),
        (lambda m: m["documents"][1].update(offset=3), "'train/a.txt' should begin at token 0, but begins at 3"),
        (lambda m: m["documents"][1].update(tokens=3), "'train/b.txt' should begin at token 3, but begins at 7"),
        (lambda m: m["documents"][2].update(name="train/a.txt"), "lists 'train/a.txt' twice"),
        (lambda m: m["documents"].pop(), r"train.bin has 24 bytes, but its manifest says 14 bytes"),
        (lambda m: m.update(documents=5), "is damaged"),
    ],
)
def test_a_manifest_that_does_not_match_its_files(
    corpus: Corpus, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    change_manifest(corpus, change)
    with pytest.raises(FileFormatError, match=message):
        Corpus(corpus.folder)


def test_a_token_file_that_is_cut_or_gone(corpus: Corpus) -> None:
    path = corpus.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(FileFormatError, match=r"train.bin has 22 bytes, but its manifest says 24 bytes; prepare"):
        Corpus(corpus.folder)
    path.unlink()
    with pytest.raises(FileFormatError, match=r"train.bin is missing"):
        Corpus(corpus.folder)


@pytest.mark.parametrize("kind", ["bytes", "own", "authors"])
@pytest.mark.parametrize("value", [0, 5, 65535])
def test_verify_finds_a_changed_token(
    kind: str, value: int, make_corpus: Callable[..., Corpus], request: pytest.FixtureRequest
) -> None:
    corpus = make_corpus(FILES, ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind))
    assert list(problems(corpus)) == []
    tokens = np.fromfile(corpus.folder / "train.bin", "<u2")
    tokens[1] = value
    tokens.tofile(corpus.folder / "train.bin")
    (problem,) = problems(Corpus(corpus.folder))
    assert problem.startswith("train/a.txt: ")


def test_verify_finds_a_changed_manifest(corpus: Corpus) -> None:
    change_manifest(corpus, lambda m: m["documents"][1].update(sha256="0" * 64))
    (problem,) = problems(Corpus(corpus.folder))
    assert problem.startswith("train/a.txt: ")
    change_manifest(corpus, lambda m: m["documents"][1].update(words=99), sealed=False)
    with pytest.raises(FileFormatError, match="it was changed after it was written"):
        Corpus(corpus.folder)


def test_another_tokenizer_file_is_refused(make_corpus: Callable[..., Corpus], own: Tokenizer) -> None:
    corpus = make_corpus(FILES, own)
    (corpus.folder / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(FileFormatError, match="is not the tokenizer that made the tokens: its SHA-256 differs"):
        list(problems(Corpus(corpus.folder)))
    (corpus.folder / "tokenizer.model").unlink()
    with pytest.raises(FileFormatError, match="can't read"):
        Corpus(corpus.folder).text("train/a.txt")


def test_the_numbers_of_info(corpus: Corpus) -> None:
    train = summarize(corpus, segment=4)["splits"]["train"]
    assert (train["documents"], train["tokens"], train["words"], train["bytes"]) == (2, 12, 3, 12)
    assert (train["tokens_per_word"], train["bytes_per_token"]) == (4.0, 1.0)
    assert (train["longest"], train["median"]) == (7, 6.0)
    # 8 and 6 positions (one more than tokens) in two segments of four each.
    assert train["padding"] == 2 / 16
    empty = summarize(corpus, segment=4)["splits"]["validation"]
    assert (empty["documents"], empty["tokens"], empty["padding"], empty["median"]) == (0, 0, None, None)
    with pytest.raises(DataError, match="--segment must be at least 1, not 0"):
        summarize(corpus, segment=0)


def test_a_stream_of_a_real_corpus(corpus: Corpus) -> None:
    steps = list(LaneStream(corpus, "train", 1, 4, one_pass=True))
    targets = np.concatenate([step.targets[0] for step in steps])
    assert bytes(targets[targets != corpus.eos_token_id].tolist()) == b"one twothree"
    assert (targets == corpus.eos_token_id).sum() == 2 + 2, "two marks and two paddings"
    assert sum(int(step.mask.sum()) for step in steps) == 12 + 2


def test_the_shared_books(books: Path, tmp_path: Path) -> None:
    corpus = prepare(PrepareSettings((str(books),)), ByteTokenizer(), tmp_path / "books")
    assert [len(corpus.documents(split)) for split in ("train", "validation", "test")] == [85, 6, 10]
    for document in corpus.documents("test"):
        raw = (books / document.name).read_bytes()
        assert corpus.text(document.name).encode() == raw
        assert document.words == len(raw.decode().split())
    assert list(problems(corpus)) == []

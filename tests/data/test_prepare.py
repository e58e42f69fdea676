"""Preparing: what is stored is what was read, whole or not at all, and nothing is lost in silence."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import Corpus
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.data.sources.document import Remarks
from block_recurrent.data.tokenizers.base import ByteTokenizer, Tokenizer
from block_recurrent.errors import DataError

from .data_helpers import left_out, names

Make = Callable[..., Corpus]
BINARY = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4


def test_what_the_manifest_says(make_corpus: Make) -> None:
    text = "Zwei Wörter\r\n\ufeff und  mehr\t\n".encode()
    corpus = make_corpus({"train/a.txt": text, "train/b/c.txt": b"x", "test/d.txt": b"d d"})
    (a, b), (d,) = corpus.documents("train"), corpus.documents("test")
    assert (a.name, a.split, a.offset, a.tokens, a.bytes) == ("train/a.txt", "train", 0, len(text), len(text))
    assert (a.words, a.characters) == (len(text.decode().split()), len(text.decode()))
    assert a.sha256 == hashlib.sha256(text).hexdigest()
    assert (b.name, b.offset, d.offset, d.words) == ("train/b/c.txt", len(text), 0, 2)
    manifest = json.loads((corpus.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["splits"]["train"] == {
        "file": "train.bin",
        "documents": 2,
        "tokens": len(text) + 1,
        "bytes": len(text) + 1,
        "words": a.words + 1,
    }
    assert manifest["splits"]["validation"]["documents"] == 0
    stored = np.fromfile(corpus.folder / "train.bin", "<u2")
    assert stored.tolist() == [*text, ord("x")]


@pytest.mark.parametrize("kind", ["bytes", "own", "authors"])
def test_a_document_larger_than_a_piece_is_encoded_as_the_tokenizer_does(
    kind: str, make_corpus: Make, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    text = "".join(f"Line {number}, with a “quotation”\nand\ta tab.\n" for number in range(30_000))
    corpus = make_corpus({"train/long.txt": text.encode(), "train/short.txt": b"short"}, tokenizer)
    long = corpus.documents("train")[0]
    assert corpus.tokens("train", 0).tolist() == tokenizer.encode(text).tolist()
    assert (long.words, long.bytes, long.characters) == (len(text.split()), len(text.encode()), len(text))
    assert corpus.text("train/short.txt") == "short"
    if kind == "authors":
        assert long.lost == 3 * 30_000
        assert not long.exact
    else:
        assert corpus.text("train/long.txt") == text
        assert (long.lost, long.unknown, long.exact) == (0, 0, True)


def test_the_folder_does_not_depend_on_the_number_of_threads(make_corpus: Make, own: Tokenizer, tmp_path: Path) -> None:
    files = {f"{number}.txt": f"{number} is a number\n".encode() * (1 + 977 * number % 3000) for number in range(60)}
    files["long.txt"] = b"a long one " * 120_000
    one = make_corpus(files, own, threads=1)
    contents = {path.name: path.read_bytes() for path in one.folder.iterdir()}
    many = make_corpus(files, own, threads=5, overwrite=True)
    assert {path.name: path.read_bytes() for path in many.folder.iterdir()} == contents
    assert sorted(contents) == ["manifest.json", "test.bin", "tokenizer.model", "train.bin", "validation.bin"]


def test_what_is_bad_is_left_out_with_its_reason_and_the_rest_is_prepared(make_corpus: Make, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "source" / "train")
    os.symlink("nowhere", tmp_path / "source" / "train" / "unreadable.txt")
    corpus = make_corpus(
        {
            "train/empty.txt": b"",
            "train/picture.png": BINARY,
            "train/good.txt": b"good",
            "train/latin.txt": "café au lait, très bon".encode("latin-1"),
            "train/nul.txt": b"one NUL \0 byte",
            "train/utf16.txt": "text of another encoding".encode("utf-16"),
        }
    )
    assert names(corpus) == ["train/good.txt", "train/latin.txt", "train/nul.txt"]
    reasons = left_out(corpus)
    assert reasons.pop("train/unreadable.txt").startswith("can't be read (No such file")
    assert reasons == {
        "train/empty.txt": "is empty",
        "train/picture.png": "is a binary file",
        "train/utf16.txt": "is a binary file",
    }
    _, latin, nul = corpus.documents("train")
    assert (latin.replaced, corpus.text("train/latin.txt")) == (2, "caf\ufffd au lait, tr\ufffds bon")
    assert (nul.nul, corpus.text("train/nul.txt")) == (1, "one NUL \0 byte")
    assert latin.sha256 == hashlib.sha256(corpus.text("train/latin.txt").encode()).hexdigest()


def test_strict_refuses_what_is_not_utf8(make_corpus: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'train/bad.txt' is not UTF-8 \(byte 0xE9\); convert it, or omit --strict"):
        make_corpus({"train/bad.txt": b"caf\xe9", "train/good.txt": b"good"}, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_character_across_chunks_is_not_an_error(make_corpus: Make) -> None:
    text = "é" * 800_001 + "x" + "漢" * 700_000
    corpus = make_corpus({"train/a.txt": b"1" + text.encode()}, strict=True)
    assert corpus.text("train/a.txt") == "1" + text
    assert corpus.documents("train")[0].replaced == 0


def test_a_file_that_ends_inside_a_character(make_corpus: Make) -> None:
    corpus = make_corpus({"train/a.txt": b"cut \xe6\xbc"})
    assert corpus.text("train/a.txt") == "cut \ufffd"
    assert corpus.documents("train")[0].replaced == 1


@pytest.mark.parametrize("files", [{}, {"a.png": BINARY, "b.txt": b""}])
def test_a_folder_without_text(files: dict[str, bytes], make_corpus: Make, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(DataError, match=r"no documents found in .*source \((the source is empty|a.png: is a)"):
        make_corpus(files)
    assert not (tmp_path / "out").exists()


def test_duplicate_names_keep_the_first_and_list_the_others(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(folder)
    settings = PrepareSettings((str(tmp_path / "one"), str(tmp_path / "two")))
    corpus = prepare(settings, ByteTokenizer(), tmp_path / "out")
    assert corpus.text("same.txt") == "one"
    assert left_out(corpus) == {"same.txt": "has the same name as an earlier document"}


def test_a_file_that_fails_in_the_middle_is_taken_back_out(
    make_corpus: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from block_recurrent.data.sources import text

    real = text._valid

    def fails(chunk: bytes, name: str, remarks: Remarks) -> bytes:
        if b"BAD" in chunk:
            raise OSError(errno.EIO, "Input/output error")
        return real(chunk, name, remarks)

    monkeypatch.setattr(text, "_valid", fails)
    corpus = make_corpus({"train/a": b"first", "train/b": b"x" * 3_000_000 + b"BAD", "train/c": b"last"})
    assert left_out(corpus) == {"train/b": "can't be read (Input/output error)"}
    assert (corpus.folder / "train.bin").stat().st_size == 2 * len("firstlast")
    assert corpus.text("train/c") == "last"


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    make_corpus: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from block_recurrent.data.corpus.token_files import TokenWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "append", full)
    with pytest.raises(
        DataError, match=r"can't write to .*out': No space left on device; the disk is full: free some space"
    ):
        make_corpus({"train/a.txt": b"text"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_noticed_when_the_last_bytes_are_written(
    make_corpus: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from block_recurrent.data.corpus import token_files

    monkeypatch.setattr(token_files, "token_file", lambda split: "/dev/full")
    with pytest.raises(DataError, match="the disk is full"):
        make_corpus({"train/a.txt": b"text"})
    assert not (tmp_path / "out").exists()


def test_a_finished_folder_is_replaced_only_when_asked(make_corpus: Make, tmp_path: Path) -> None:
    make_corpus({"train/a.txt": b"one"})
    with pytest.raises(
        DataError, match="already contains prepared data; give --overwrite to replace it, or another --out"
    ):
        make_corpus({"train/a.txt": b"two"})
    assert Corpus(tmp_path / "out").text("train/a.txt") == "one"
    assert make_corpus({"train/a.txt": b"three"}, overwrite=True).text("train/a.txt") == "three"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_are_not_ours_are_never_touched(make_corpus: Make, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"contains 'thesis.tex', which is not prepared data; choose another --out"):
        make_corpus({"train/a.txt": b"one"}, overwrite=overwrite)
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"contains 'thesis.tex'"):
        make_corpus({"train/a.txt": b"one"}, overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_out_may_be_an_empty_folder_but_no_file(make_corpus: Make, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(DataError, match="is a file; give a folder"):
        make_corpus({"train/a.txt": b"one"})
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    assert make_corpus({"train/a.txt": b"one"}).text("train/a.txt") == "one"


def test_out_inside_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for out in (tmp_path, tmp_path / "build" / "out"):
        with pytest.raises(DataError, match="is inside the source"):
            prepare(PrepareSettings((str(tmp_path),), overwrite=True), ByteTokenizer(), out)


def test_a_failed_replacement_keeps_the_old_folder(
    make_corpus: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus({"train/a.txt": b"one"})
    rename = os.replace

    def fails(source: Path, target: Path) -> None:
        if str(source).endswith("out.part"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(DataError, match="Input/output error"):
        make_corpus({"train/a.txt": b"two"}, overwrite=True)
    assert Corpus(tmp_path / "out").text("train/a.txt") == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


SCRIPT = """
import sys, time
from pathlib import Path
from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
from block_recurrent.data.tokenizers.base import ByteTokenizer

def progress(documents, size):
    print("going", flush=True)
    time.sleep(30)

try:
    prepare(PrepareSettings((sys.argv[1],)), ByteTokenizer(), Path(sys.argv[2]), progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "source").mkdir(exist_ok=True)
    (tmp_path / "source" / "a.txt").write_text("text " * 1000)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "source"), str(tmp_path / "out")]
    # A suite that runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    return process


def test_a_killed_run_leaves_nothing_that_looks_finished_and_the_next_one_works(
    make_corpus: Make, tmp_path: Path
) -> None:
    process = start(tmp_path)
    with pytest.raises(DataError, match="another run is writing to"):
        make_corpus({"train/b.txt": b"text"})
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="is not prepared data"):
        Corpus(tmp_path / "out")
    assert (tmp_path / ".out.part").is_dir()
    assert make_corpus({"train/b.txt": b"text"}).text("train/b.txt") == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_ctrl_c_ends_at_once_and_clears_away(tmp_path: Path) -> None:
    process = start(tmp_path)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - begin < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation": -0.1}, "the share --validation must be 0 to 1, not -0.1"),
        ({"test": 1.5}, "the share --test must be 0 to 1, not 1.5"),
        ({"validation": 0.6, "test": 0.6}, "must add up to at most 1"),
        ({"threads": 0}, "--threads must be at least 1, not 0"),
        ({"sources": ()}, "no source given"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PrepareSettings(**({"sources": ("x",)} | settings))  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_line_of_100_megabytes(make_corpus: Make, own: Tokenizer) -> None:
    line = b"one hundred megabytes without a line end, " * 2_400_000
    corpus = make_corpus({"train/line.txt": line})
    assert corpus.documents("train")[0].sha256 == hashlib.sha256(line).hexdigest()

"""Sources: which documents there are, what they are called, and which split they fall into."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.data.sources import find_documents, total_size
from block_recurrent.data.sources.document import Document, LeftOut, Remarks, deal_split
from block_recurrent.errors import DataError, MissingExtraError


def write(root: Path, files: dict[str, bytes | str]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)


def documents(source: str, unit: Any = "file") -> dict[str, tuple[str | None, bytes]]:
    found = [each for each in find_documents(source, unit) if isinstance(each, Document)]
    return {each.name: (each.split, b"".join(each.read(Remarks()))) for each in found}


def left_out(source: str, unit: Any = "file") -> dict[str, str]:
    return {each.name: each.reason for each in find_documents(source, unit) if isinstance(each, LeftOut)}


def test_a_folder_of_files_at_any_depth_in_path_order(tmp_path: Path) -> None:
    source = write(tmp_path, {"b.txt": "B", "a/z/deep.md": "deep", "a/one.txt": "one"})
    assert documents(source) == {"a/one.txt": (None, b"one"), "a/z/deep.md": (None, b"deep"), "b.txt": (None, b"B")}
    assert list(documents(source)) == ["a/one.txt", "a/z/deep.md", "b.txt"]
    assert total_size([source]) == 8


def test_split_folders_are_the_splits_and_the_rest_is_left_out(tmp_path: Path) -> None:
    source = write(tmp_path, {"train/x/a.txt": "a", "test/b.txt": "b", "README": "r", "more/c.txt": "c"})
    assert documents(source) == {"test/b.txt": ("test", b"b"), "train/x/a.txt": ("train", b"a")}
    assert left_out(source) == dict.fromkeys(("README", "more"), "is outside the folders train, validation and test")


def test_a_single_file(tmp_path: Path) -> None:
    write(tmp_path, {"book.txt": "text"})
    assert documents(str(tmp_path / "book.txt")) == {"book.txt": (None, b"text")}


def test_folders_as_documents_have_a_header_line_per_file(tmp_path: Path) -> None:
    source = write(
        tmp_path, {"repo/b.py": "no newline", "repo/a/x.py": "x\n", "repo/c.py": "", "two/t.c": "t", "loose": ""}
    )
    assert documents(source, "folder") == {
        "repo": (None, b"==> a/x.py <==\nx\n==> b.py <==\nno newline"),
        "two": (None, b"==> t.c <==\nt"),
    }
    assert list(left_out(source, "folder")) == ["loose"]


def test_the_header_of_the_next_file_begins_a_line(tmp_path: Path) -> None:
    source = write(tmp_path, {"train/repo/a": "no newline", "train/repo/b": "b"})
    assert documents(source, "folder") == {"train/repo": ("train", b"==> a <==\nno newline\n==> b <==\nb")}


def test_bad_files_inside_a_folder_document_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    source = write(tmp_path, {"repo/a.png": b"\x89PNG\r\n\x1a\n" + bytes(200), "repo/b.txt": "b"})
    os.symlink("nowhere", tmp_path / "repo" / "link")
    (document,) = find_documents(source, "folder")
    assert isinstance(document, Document)
    remarks = Remarks()
    assert b"".join(document.read(remarks)) == b"==> b.txt <==\nb"
    reasons = {left.name: left.reason for left in remarks.left_out}
    assert reasons["repo/a.png"] == "is a binary file"
    assert reasons["repo/link"].startswith("can't be read")


def test_version_control_links_to_folders_and_pipes_are_left_out(tmp_path: Path) -> None:
    source = write(tmp_path, {"a/.git/config": "x", "a/b.txt": "b"})
    os.symlink(tmp_path, tmp_path / "a" / "round")
    os.mkfifo(tmp_path / "a" / "pipe")
    assert list(documents(source)) == ["a/b.txt"]
    assert left_out(source) == {
        "a/.git": "is a version control folder",
        "a/pipe": "is not a regular file",
        "a/round": "is a link to a folder",
    }


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert list(documents(str(tmp_path))) == ["caf\\udce9.txt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    lines = [
        json.dumps({"text": "one\r\n\ufeff"}),
        "",
        "not json",
        json.dumps({"words": "no text"}),
        json.dumps({"text": 5}),
        json.dumps([1]),
        json.dumps({"text": "two", "name": "second"}),
        '{"text": "half \\ud800"}',
    ]
    raw = "\n".join(lines).encode()
    path = tmp_path / f"set{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    assert documents(str(path)) == {
        f"set{suffix}:1": (None, "one\r\n\ufeff".encode()),
        "second": (None, b"two"),
        f"set{suffix}:8": (None, "half \ufffd".encode()),
    }
    reasons = left_out(str(path))
    assert reasons.pop(f"set{suffix}:3") == "is not a line of JSON in UTF-8"
    assert reasons == {f"set{suffix}:{n}": "has no field 'text' with a string" for n in (4, 5, 6)}
    assert total_size([str(path)]) is None


def test_json_lines_in_a_split_folder_belong_to_the_split(tmp_path: Path) -> None:
    source = write(tmp_path, {"validation/set.jsonl": '{"text": "t"}\n'})
    assert documents(source) == {"validation/set.jsonl:1": ("validation", b"t")}


def test_a_damaged_gz_keeps_what_was_whole(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": os.urandom(200).hex()}) + "\n" for _ in range(200))
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(gzip.compress(rows.encode())[:-5000])
    assert len(documents(str(path))) > 10
    assert "is truncated or damaged after line" in left_out(str(path))["set.jsonl.gz"]
    path.write_bytes(b"no gzip at all")
    assert documents(str(path)) == {}
    assert "can't be read" in left_out(str(path))["set.jsonl.gz"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"], "other": [1, 2, 3]}), path)
    assert documents(str(path)) == {"set.parquet:1": (None, b"one"), "set.parquet:3": (None, b"three")}
    assert left_out(str(path)) == {"set.parquet:2": "has no field 'text' with a string"}
    path.write_bytes(b"no parquet")
    assert "is not a readable Parquet file" in left_out(str(path))["set.parquet"]


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "set.parquet").write_bytes(b"x")
    with pytest.raises(MissingExtraError, match=r"pip install 'block-recurrent\[parquet\]'"):
        documents(str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip install 'block-recurrent\[datasets\]'"):
        documents("hf:emozilla/pg19")


class FakeHub(types.ModuleType):
    """Stands in for the package `datasets`, which is large and needs the network."""

    def __init__(self, parts: Any) -> None:
        super().__init__("datasets")
        self.parts = parts

    def load_dataset(self, path: str, configuration: str | None, streaming: bool) -> Any:
        assert streaming
        if isinstance(self.parts, Exception):
            raise self.parts
        return self.parts[path, configuration]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_hugging_face_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "t0", "url": "u"}, {"text": "t1"}]
    parts = {
        ("some/books", None): {"train": rows, "valid": rows[:1], "extra": rows},
        ("one", "en"): {"train": rows},
    }
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(parts))
    assert documents("hf:some/books") == {
        "train/0": ("train", b"t0"),
        "train/1": ("train", b"t1"),
        "valid/0": ("validation", b"t0"),
    }
    assert list(left_out("hf:some/books")) == ["extra"]
    assert documents("hf:one:en") == {"train/0": (None, b"t0"), "train/1": (None, b"t1")}


def test_a_hugging_face_set_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(ConnectionError("no route to host\nlong trace")))
    with pytest.raises(
        DataError, match=r"^can't load the Hugging Face dataset 'x/y' \(no route to host\); check name and"
    ):
        documents("hf:x/y")


def test_the_standard_library() -> None:
    found = documents("stdlib")
    assert "argparse.py" in found
    assert found["argparse.py"][1] == Path(sys.modules["argparse"].__file__ or "").read_bytes()
    assert found["json"][1].startswith(b"==> __init__.py <==\n")
    assert not {"site-packages", "test", "this.py", "__pycache__"} & set(found)
    assert all(len(text) >= 20_000 for _, text in found.values())
    assert len(found) > 50


def test_a_source_that_is_not_there() -> None:
    with pytest.raises(
        DataError, match="source 'nowhere' does not exist; give a file, a folder, 'stdlib', 'installed', 'pypi:"
    ):
        find_documents("nowhere")


def test_splits_by_name_are_stable_and_of_the_shares_asked_for() -> None:
    names = [f"document {number}" for number in range(4000)]
    splits = [deal_split(name, 0.1, 0.2) for name in names]
    assert 0.08 < splits.count("validation") / 4000 < 0.12
    assert 0.17 < splits.count("test") / 4000 < 0.23
    assert splits == [deal_split(name, 0.1, 0.2) for name in names]
    assert {deal_split(name, 0, 0) for name in names} == {"train"}
    # Written down, so that no later version deals documents differently.
    assert [deal_split(name, 0.3, 0.3) for name in ("a", "b", "c", "é")] == ["train", "test", "test", "test"]

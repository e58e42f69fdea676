"""Where documents come from: text files, folders, JSON lines, Parquet, Hugging Face sets, and Python's own library.

A source yields `Document`s, whose text is read later and piece by piece, and `LeftOut`s, each with its reason. Text is
taken as it is: line ends and byte-order marks are not touched.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from block_recurrent.data.files import LeftOut, Remarks, read_file, reason_of
from block_recurrent.data.records import RECORD_SUFFIXES, Record, hub_records, read_records
from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import DataError

SPLITS = ("train", "validation", "test")
STDLIB = "stdlib"
HUB = "hf:"
STDLIB_LEAST_BYTES = 20_000
VERSION_CONTROL = (".git", ".hg", ".svn")
IS_VERSION_CONTROL = "is version control's own folder"
Unit = Literal["file", "folder"]


@dataclass(frozen=True)
class Document:
    """A name, the split it belongs to (None: dealt by a hash of the name), and how to read its UTF-8 in chunks."""

    name: str
    split: str | None
    read: Callable[[Remarks], Iterator[bytes]]


Found = Document | LeftOut


def find_documents(source: str, unit: Unit = "file") -> Iterator[Found]:
    """The documents of one source: a path, `stdlib`, or `hf:NAME`."""
    if source == STDLIB:
        return _standard_library()
    if source.startswith(HUB):
        return _records(hub_records(source.removeprefix(HUB)))
    path = Path(source)
    if os.path.isdir(path):
        return _folder(path, unit)
    if not os.path.exists(path):
        raise DataError(f"there is no source '{source}'; give a file, a folder, '{STDLIB}' or '{HUB}NAME'")
    return _file(path, path.name, None)


def total_size(sources: Sequence[str]) -> int | None:
    """Bytes of the files of sources, for a progress bar; None where that is not the size of their text."""
    sizes = [_size_of(source) for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _size_of(source: str) -> int | None:
    path = Path(source)
    if source == STDLIB or source.startswith(HUB) or not os.path.exists(path):
        return None
    walk = [(source, [], [""])] if os.path.isfile(path) else os.walk(path)
    size = 0
    for folder, _, names in walk:
        for name in names:
            if _is_record_file(Path(folder, name)):
                return None
            with suppress(OSError):  # reported when it is read
                size += os.lstat(Path(folder, name)).st_size
    return size


def deal_split(name: str, validation: float, test: float) -> str:
    """The split of a document by a hash of its name: it never depends on the other documents."""
    chance = chance_of(name)
    return "test" if chance < test else "validation" if chance < test + validation else "train"


def chance_of(name: str) -> float:
    """A number from 0 to 1 that looks random and always is the same for a name."""
    return int.from_bytes(hashlib.sha256(to_utf8(name)).digest()[:8], "big") / 2**64


def _folder(root: Path, unit: Unit) -> Iterator[Found]:
    entries = _entries(root)
    if not any(entry.name in SPLITS and os.path.isdir(entry) for entry in entries):
        yield from _documents_in(root, root, unit, None)
        return
    for entry in entries:
        if entry.name in SPLITS and os.path.isdir(entry):
            yield from _documents_in(entry, root, unit, entry.name)
        else:
            yield LeftOut(_name(entry, root), "is outside the folders train, validation and test")


def _documents_in(folder: Path, root: Path, unit: Unit, split: str | None) -> Iterator[Found]:
    if unit == "file":
        for path in _files(folder, root):
            yield from [path] if isinstance(path, LeftOut) else _file(path, _name(path, root), split)
        return
    for entry in _entries(folder):
        name = _name(entry, root)
        if not os.path.isdir(entry):
            yield LeftOut(name, "is a file beside the folders; with --unit folder each folder is a document")
        elif entry.name in VERSION_CONTROL:
            yield LeftOut(name, IS_VERSION_CONTROL)
        else:
            yield Document(name, split, _concatenation(entry, root))


def _file(path: Path, name: str, split: str | None) -> Iterator[Found]:
    if _is_record_file(path):
        yield from _records(read_records(path, name, split))
    else:
        yield Document(name, split, lambda remarks: read_file(path, name, remarks))


def _concatenation(folder: Path, root: Path, suffix: str = "") -> Callable[[Remarks], Iterator[bytes]]:
    """Reads all files of a folder as one text, each after a header line with its path."""

    def read(remarks: Remarks) -> Iterator[bytes]:
        at_line_start = True
        for path in _files(folder, root):
            if isinstance(path, LeftOut):
                remarks.left_out.append(path)
                continue
            if not path.name.endswith(suffix):
                continue
            name = _name(path, root)
            header = f"==> {_name(path, folder)} <==\n".encode()
            try:
                for index, chunk in enumerate(read_file(path, name, remarks)):
                    if index == 0:
                        yield header if at_line_start else b"\n" + header
                    yield chunk
                    at_line_start = chunk.endswith(b"\n")
            except LeftOut as left_out:
                remarks.left_out.append(left_out)

    return read


def _records(records: Iterator[Record | LeftOut]) -> Iterator[Found]:
    for record in records:
        if isinstance(record, LeftOut):
            yield record
        else:
            yield Document(record.name, record.split, _text_reader(record.text))


def _text_reader(text: str) -> Callable[[Remarks], Iterator[bytes]]:
    def read(remarks: Remarks) -> Iterator[bytes]:
        raw = to_utf8(text)
        remarks.note(raw, replaced=raw.count(b"\xef\xbf\xbd") - text.count("\ufffd"))
        yield raw

    return read


def _standard_library() -> Iterator[Found]:
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "os.py").is_file():
        raise DataError(f"this Python has no library source in '{root}'; give a file or a folder")
    for entry in _entries(root):
        package = os.path.isdir(entry)
        if entry.stem not in sys.stdlib_module_names or not (package or entry.suffix == ".py"):
            continue
        files = entry.rglob("*.py") if package else [entry]
        if sum(path.stat().st_size for path in files) >= STDLIB_LEAST_BYTES:
            if package:
                yield Document(entry.name, None, _concatenation(entry, root, ".py"))
            else:
                yield from _file(entry, entry.name, None)


def _entries(folder: Path) -> list[Path]:
    try:
        return _in_order(folder)
    except OSError as error:
        raise DataError(f"can't read the folder '{folder}': {error.strerror}") from None


def _in_order(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder))]


def _files(folder: Path, root: Path) -> Iterator[Path | LeftOut]:
    """All regular files below a folder, in path order, and what is none. Links to folders could lead in circles."""
    try:
        entries = _in_order(folder)
    except OSError as error:
        yield LeftOut(_name(folder, root), reason_of(error))
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            yield LeftOut(_name(entry, root), reason_of(error))
            continue
        if stat.S_ISREG(mode):
            yield entry
        elif not stat.S_ISDIR(mode):
            yield LeftOut(_name(entry, root), "is not a regular file")
        elif entry.is_symlink():
            yield LeftOut(_name(entry, root), "is a link to a folder")
        elif entry.name in VERSION_CONTROL:
            yield LeftOut(_name(entry, root), IS_VERSION_CONTROL)
        else:
            yield from _files(entry, root)


def _name(path: Path, root: Path) -> str:
    # A file name need not be UTF-8; the manifest must be.
    return path.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode()


def _is_record_file(path: Path) -> bool:
    return path.name.lower().endswith(RECORD_SUFFIXES)

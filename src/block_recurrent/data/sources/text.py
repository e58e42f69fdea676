"""Text files and folders of them, read in chunks of valid UTF-8; and the detection of binary files."""

from __future__ import annotations

import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from block_recurrent.data.sources.document import SPLITS, Document, Found, LeftOut, Remarks, UnreadableError
from block_recurrent.data.sources.records import is_record_file, read_records
from block_recurrent.data.utf8 import last_character_end
from block_recurrent.errors import DataError

Unit = Literal["file", "folder"]
CHUNK_BYTES = 1 << 21
# Characters that are rare in text. Tab, line endings, form feed, backspace and escape do occur in text.
SAMPLE_BYTES = 1 << 13
ODD = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
ODD_SHARE, ODD_SHARE_WITH_NUL = 0.5, 0.1
SHORT = 64
REPLACEMENT = "\ufffd".encode()
STDLIB_LEAST_BYTES = 20_000
VERSION_CONTROL = (".git", ".hg", ".svn")
IS_VERSION_CONTROL = "is a version control folder"


def folder_documents(root: Path, unit: Unit) -> Iterator[Found]:
    """The documents of a folder; if it has folders named after splits, those are the splits."""
    entries = _entries(root)
    if not any(entry.name in SPLITS and os.path.isdir(entry) for entry in entries):
        yield from _documents_in(root, root, unit, None)
        return
    for entry in entries:
        if entry.name in SPLITS and os.path.isdir(entry):
            yield from _documents_in(entry, root, unit, entry.name)
        else:
            yield LeftOut(_name(entry, root), "is outside the folders train, validation and test")


def path_documents(path: Path, name: str, split: str | None) -> Iterator[Found]:
    """The document of a text file, or those of a file of records."""
    if is_record_file(path):
        yield from read_records(path, name, split)
    else:
        yield Document(name, split, lambda remarks: _read_file(path, name, remarks))


def standard_library() -> Iterator[Found]:
    """The packages and modules of this Python's own library."""
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
                yield Document(entry.name, None, partial(_read_folder, folder=entry, root=root, suffix=".py"))
            else:
                yield from path_documents(entry, entry.name, None)


def _documents_in(folder: Path, root: Path, unit: Unit, split: str | None) -> Iterator[Found]:
    if unit == "file":
        for path in _files(folder, root):
            yield from [path] if isinstance(path, LeftOut) else path_documents(path, _name(path, root), split)
        return
    for entry in _entries(folder):
        name = _name(entry, root)
        if not os.path.isdir(entry):
            yield LeftOut(name, "is a file next to the folders; with --unit folder each folder is a document")
        elif entry.name in VERSION_CONTROL:
            yield LeftOut(name, IS_VERSION_CONTROL)
        else:
            yield Document(name, split, partial(_read_folder, folder=entry, root=root))


def concatenation(files: Iterable[tuple[str, Iterator[bytes]]], remarks: Remarks) -> Iterator[bytes]:
    """Joins files (path and chunks) into one text, each after a header line with its path."""
    at_line_start = True
    for path, chunks in files:
        header = f"==> {path} <==\n".encode()
        try:
            for index, chunk in enumerate(chunks):
                if index == 0:
                    yield header if at_line_start else b"\n" + header
                yield chunk
                at_line_start = chunk.endswith(b"\n")
        except UnreadableError as error:
            remarks.left_out.append(error.left_out)


def _read_folder(remarks: Remarks, folder: Path, root: Path, suffix: str = "") -> Iterator[bytes]:
    def files() -> Iterator[tuple[str, Iterator[bytes]]]:
        for path in _files(folder, root):
            if isinstance(path, LeftOut):
                remarks.left_out.append(path)
            elif path.name.endswith(suffix):
                yield _name(path, folder), _read_file(path, _name(path, root), remarks)

    return concatenation(files(), remarks)


def _read_file(path: Path, name: str, remarks: Remarks) -> Iterator[bytes]:
    """The unmodified text of a file, in chunks of UTF-8 that end between characters."""
    rest = b""
    first = True
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                chunk = rest + chunk if rest else chunk
                end = last_character_end(chunk)
                rest, chunk = chunk[end:], chunk[:end]
                if first and _looks_binary(chunk or rest):
                    raise UnreadableError(name, "is a binary file")
                first = False
                if chunk:
                    yield _valid(chunk, name, remarks)
    except OSError as error:
        raise UnreadableError(name, _reason_of(error)) from None
    if rest:
        yield _valid(rest, name, remarks)


def _valid(chunk: bytes, name: str, remarks: Remarks) -> bytes:
    replaced = 0
    try:
        if not chunk.isascii():
            chunk.decode()
    except UnicodeDecodeError as error:
        if remarks.strict:
            raise DataError(
                f"'{name}' is not UTF-8 (byte 0x{chunk[error.start]:02X}); convert it, or omit --strict"
            ) from None
        text = chunk.decode("utf-8", "replace").encode()
        replaced = text.count(REPLACEMENT) - chunk.count(REPLACEMENT)
        chunk = text
    remarks.note(chunk, replaced)
    return chunk


def _looks_binary(chunk: bytes) -> bool:
    sample = chunk[:SAMPLE_BYTES].decode("utf-8", "replace")
    odd = len(ODD.findall(sample)) / max(len(sample), 1)
    if "\0" in sample:
        return odd > ODD_SHARE_WITH_NUL
    return len(sample) >= SHORT and odd > ODD_SHARE


def _entries(folder: Path) -> list[Path]:
    try:
        return _in_order(folder)
    except OSError as error:
        raise DataError(f"can't read the folder '{folder}': {error.strerror}") from None


def _in_order(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder))]


def _files(folder: Path, root: Path) -> Iterator[Path | LeftOut]:
    """All regular files below a folder, in path order, and what was skipped. Links to folders could form cycles."""
    try:
        entries = _in_order(folder)
    except OSError as error:
        yield LeftOut(_name(folder, root), _reason_of(error))
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            yield LeftOut(_name(entry, root), _reason_of(error))
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


def _reason_of(error: OSError) -> str:
    return f"can't be read ({error.strerror or error})"

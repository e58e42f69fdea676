"""Python packages as documents: those installed in this environment, and wheels. Nothing in them is imported or run.

A distribution is one document, its Python files in path order, each after a line `==> path <==`. A large one is cut at
its subpackages; all parts of a distribution belong to the same split. Vendored copies of other packages are skipped.
"""

from __future__ import annotations

import email
import importlib.metadata
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from block_recurrent.data.sources.document import Document, Found, LeftOut, Package, Remarks, UnreadableError
from block_recurrent.data.sources.text import concatenation
from block_recurrent.errors import DataError

LARGE_BYTES = 2_000_000  # of a document, above which it is split at its subpackages
LEAST_BYTES = 20_000  # of an installed distribution, and of a subpackage that becomes a separate document
MOST_FILE_BYTES = 1_000_000  # larger files are tables, not code
VENDORED = {"_vendor", "_vendored", "extern", "externals", "third_party", "vendor", "vendored"}
HEAD_BYTES = 512
GENERATED = re.compile(
    rb"\b(auto[- ]?|automatically |file (was |is )?)generated\b|do not edit|^#\W*generated (by|from)\b",
    re.IGNORECASE | re.MULTILINE,
)


class SourceFile(NamedTuple):
    """A Python file of a distribution."""

    path: str  # from the distribution's root, with slashes
    size: int
    read: Callable[[], bytes]


def installed_documents() -> Iterator[Found]:
    """The distributions installed in this environment, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(normalized(name), distribution)  # the first one is what Python imports
    for name, distribution in sorted(found.items()):
        files = []
        for path in map(Path, map(str, distribution.files or ())):
            place = Path(str(distribution.locate_file(path)))
            if _is_source(path.as_posix()) and place.is_file():
                files.append(SourceFile(path.as_posix(), place.stat().st_size, place.read_bytes))
        package = Package(name, distribution.version, _license(distribution.metadata), None)
        if sum(file.size for file in files) < LEAST_BYTES:
            yield LeftOut(package.label, f"has less than {LEAST_BYTES // 1000} kB of Python source")
        else:
            yield from _documents(package, None, files)


def wheel_documents(wheel: Path, split: str | None, sha256: str) -> Iterator[Found]:
    """The documents of a wheel, whose hash is known."""
    try:
        archive = zipfile.ZipFile(wheel)  # closed with the last document that reads from it
        entries = {entry.filename: entry for entry in archive.infolist()}
        (described,) = (name for name in entries if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = email.message_from_bytes(archive.read(described))
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"'{wheel}' is not a readable wheel ({error}); delete it, and run again") from None
    package = Package(normalized(metadata["Name"]), metadata["Version"], _license(metadata), sha256)
    files = [
        SourceFile(path, entry.file_size, partial(archive.read, entry))
        for path, entry in entries.items()
        if _is_source(path)
    ]
    if files:
        yield from _documents(package, split, files)
    else:
        yield LeftOut(package.label, "has no Python source")


def normalized(name: str) -> str:
    """The normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _documents(package: Package, split: str | None, files: list[SourceFile]) -> Iterator[Document]:
    for folder, part in _parts(files, ""):
        name = f"{package.label}/{folder}".rstrip("/")
        yield Document(name, split, partial(_read, name=package.label, files=part), package)


def _parts(files: list[SourceFile], folder: str) -> Iterator[tuple[str, list[SourceFile]]]:
    """The files of a folder as one part; or, if they are too many, its own files, and each subfolder."""
    if _size(files) <= LARGE_BYTES:
        yield folder, _in_order(files)
        return
    own: list[SourceFile] = []
    inside: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        head, slash, _ = file.path.removeprefix(folder).partition("/")
        (inside[f"{folder}{head}/"] if slash else own).append(file)
    for subfolder in [each for each in inside if _size(inside[each]) < LEAST_BYTES]:
        own += inside.pop(subfolder)
    if own:
        yield folder, _in_order(own)
    for subfolder in sorted(inside):
        yield from _parts(inside[subfolder], subfolder)


def _size(files: list[SourceFile]) -> int:
    return sum(file.size for file in files if file.size <= MOST_FILE_BYTES)


def _in_order(files: list[SourceFile]) -> list[SourceFile]:
    return sorted(files, key=lambda file: file.path.split("/"))


def _read(remarks: Remarks, name: str, files: list[SourceFile]) -> Iterator[bytes]:
    return concatenation(((file.path, _source(file, f"{name}/{file.path}", remarks)) for file in files), remarks)


def _source(file: SourceFile, name: str, remarks: Remarks) -> Iterator[bytes]:
    if file.size > MOST_FILE_BYTES:
        raise UnreadableError(name, f"is larger than {MOST_FILE_BYTES // 1_000_000} MB")
    try:
        raw = file.read()
        raw.decode()
    except UnicodeDecodeError:
        raise UnreadableError(name, "is not UTF-8") from None
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UnreadableError(name, f"can't be read ({error})") from None
    if GENERATED.search(raw[:HEAD_BYTES]):
        raise UnreadableError(name, "is generated")
    if raw:
        remarks.note(raw, replaced=0)
        yield raw


def _is_source(path: str) -> bool:
    *folders, name = path.split("/")
    outside = folders and (folders[0] == ".." or folders[0].endswith((".data", ".dist-info")))
    return name.endswith(".py") and not outside and VENDORED.isdisjoint(folders)


def _license(metadata: Any) -> str | None:
    """As the distribution states it: an SPDX expression, its classifiers, or the first line of the license field."""
    classified = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if "License ::" in line]
    own_words = (metadata.get("License") or "").strip().partition("\n")[0]
    return metadata.get("License-Expression") or ", ".join(classified) or own_words or None

"""Sources of documents: text files, folders, JSON lines, Parquet, Hugging Face datasets, and Python packages.

A source yields `Document`s, whose text is read later and piece by piece, and `LeftOut`s, each with a reason. Text is
not modified: line endings and byte-order marks are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from block_recurrent.data.sources.document import Found
from block_recurrent.data.sources.packages import installed_documents
from block_recurrent.data.sources.pypi import pypi_documents
from block_recurrent.data.sources.records import hub_documents, is_record_file
from block_recurrent.data.sources.text import Unit, folder_documents, path_documents, standard_library
from block_recurrent.errors import DataError

KINDS = "a file, a folder, 'stdlib', 'installed', 'pypi:NAME==VERSION' or 'hf:NAME'"
STDLIB, INSTALLED = "stdlib", "installed"
HUB, PYPI = "hf:", "pypi:"


def find_documents(source: str, unit: Unit = "file") -> Iterator[Found]:
    """The documents of one source: a path, `stdlib`, `installed`, `pypi:NAME==VERSION`, or `hf:NAME`."""
    if source == STDLIB:
        return standard_library()
    if source == INSTALLED:
        return installed_documents()
    if source.startswith(PYPI):
        return pypi_documents(source.removeprefix(PYPI))
    if source.startswith(HUB):
        return hub_documents(source.removeprefix(HUB))
    path = Path(source)
    if os.path.isdir(path):
        return folder_documents(path, unit)
    if not os.path.exists(path):
        raise DataError(f"source '{source}' does not exist; give {KINDS}")
    if not os.path.isfile(path):  # reading a pipe would block
        raise DataError(f"source '{source}' is not a regular file; give {KINDS}")
    return path_documents(path, path.name, None)


def total_size(sources: Sequence[str]) -> int | None:
    """Size of the files of sources, for a progress bar; None if that is not the size of their text."""
    sizes = [_size_of(source) for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _size_of(source: str) -> int | None:
    path = Path(source)
    if source in (STDLIB, INSTALLED) or source.startswith((HUB, PYPI)) or not os.path.exists(path):
        return None
    walk = [(source, [], [""])] if os.path.isfile(path) else os.walk(path)
    size = 0
    for folder, _, names in walk:
        for name in names:
            if is_record_file(Path(folder, name)):
                return None
            with suppress(OSError):  # reported when it is read
                size += os.lstat(Path(folder, name)).st_size
    return size

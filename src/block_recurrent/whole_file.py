"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` to write to: synced and renamed when the block ends well, deleted when it doesn't."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A folder that appears whole or not at all: it is built beside its place, hidden, and renamed at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from block_recurrent.errors import DataError
from block_recurrent.whole_file import sync


@contextmanager
def staged_folder(out: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Gives an empty folder to write into; it becomes `out` when the block ends well, and is deleted when it doesn't.

    `check` raises if what is at `out` must not be replaced. What a killed run left behind is cleared away here.
    """
    out = Path(os.path.realpath(out))
    partial, old = out.parent / f".{out.name}.partial", out.parent / f".{out.name}.old"
    out.parent.mkdir(parents=True, exist_ok=True)
    _finish_replacement(out, old)
    check(out)
    with _claimed(partial):
        try:
            yield partial
            check(out)
            sync(partial)
            if out.exists():
                os.rename(out, old)
            os.rename(partial, out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            _finish_replacement(out, old)


def _finish_replacement(out: Path, old: Path) -> None:
    """A run may have stopped between moving the old folder away and the new one in: then the old one goes back."""
    if not old.exists():
        return
    if out.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, out)


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Makes the folder, empties it, and keeps other runs out of it."""
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _lock(handle, partial)
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        yield
    finally:
        os.close(handle)


def _lock(handle: int, partial: Path) -> None:
    import fcntl

    taken = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken = True
    except OSError:
        pass  # a file system without locks
    # The run that had the lock may just have finished and renamed the folder away.
    if taken or not (partial.exists() and os.path.samestat(os.fstat(handle), os.stat(partial))):
        raise DataError(f"another run is writing to '{partial}'; wait for it, or give another --out")

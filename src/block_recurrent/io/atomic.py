"""Files and folders that appear whole or not at all, also after a crash or a power failure.

Both are written under a hidden name beside their place, synced, renamed, and then the folder that holds them is synced.
What killed processes left behind is deleted when the same file or folder is written again, or by `sweep`.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_SECONDS = 24 * 3600  # no process that still writes leaves its file alone for so long


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` to write to: renamed to `path` when the block ends well, deleted when it doesn't."""
    # A name of its own, so that several processes and threads may write the same file; the last one wins.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    _delete_stale(path)
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, check: Callable[[Path], None] = lambda path: None) -> Iterator[Path]:
    """A hidden empty folder to write into: renamed to `path` when the block ends well, deleted when it doesn't.

    `check(path)` raises if what is at `path` must not be replaced; it runs before the block and after it. While the
    block runs, another process that writes the same folder gets a BlockingIOError.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    with _claimed(part):
        try:
            _recover(path)
            check(path)
            yield part
            check(path)
            commit_folder(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def part_of(path: Path) -> Path:
    """Where a folder is written before `commit_folder` renames it."""
    return path.with_name(f".{path.name}.part")


def commit_folder(path: Path) -> None:
    """Sync everything in `part_of(path)` and rename it to `path`; a folder that was there is deleted."""
    part = part_of(path)
    for folder, _, names in os.walk(part, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    try:
        if path.exists():
            os.replace(path, _old_of(path))
        os.replace(part, path)
        sync(path.parent)
    finally:
        _recover(path)


def remove_folder(path: Path) -> None:
    """Delete a folder; one that is half deleted is no longer in its place."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear away what killed processes left of the folders in `folder`. Nothing else may be writing there."""
    for path in sorted(folder.glob(".*.old")):
        _recover(path.with_name(path.name[1 : -len(".old")]))
    for suffix in (".part", ".gone"):
        for path in folder.glob(f".*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems can't sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _recover(path: Path) -> None:
    """A process may have stopped between moving the old folder away and the new one in: then the old one goes back."""
    old = _old_of(path)
    if old.exists() and path.exists():
        shutil.rmtree(old)
    elif old.exists():
        os.replace(old, path)


def _delete_stale(path: Path) -> None:
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):  # another process may delete it too
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()


@contextmanager
def _claimed(part: Path) -> Iterator[None]:
    """Make the folder, keep other processes out of it, and empty it."""
    part.mkdir(exist_ok=True)
    handle = os.open(part, os.O_RDONLY)
    try:
        _lock(handle, part)
        for entry in part.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        yield
    finally:
        os.close(handle)


def _lock(handle: int, part: Path) -> None:
    import fcntl

    taken = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken = True
    except OSError:
        pass  # a file system without locks
    # The process that had the lock may just have finished and renamed the folder away.
    if taken or not (part.exists() and os.path.samestat(os.fstat(handle), os.stat(part))):
        raise BlockingIOError(errno.EAGAIN, f"another run is writing to '{part}'; wait for it, or choose another place")

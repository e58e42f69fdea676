"""Atomic writes of files and folders, which also survive a crash or a power failure.

Both are written under a hidden temporary name in the same folder, synced and renamed; then that folder is synced.
Temporary files of killed processes are deleted when the same file or folder is written again, or by `sweep`.
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

STALE_SECONDS = 24 * 3600  # a process that is still writing touches its file more often


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A hidden temporary file to write to: renamed to `path` if the block succeeds, deleted if it fails."""
    path = Path(os.path.realpath(path))  # a link stays one, to a new file
    if (path.exists() and not path.is_file()) or path.is_symlink():  # a link that leads nowhere, but to itself
        raise OSError(errno.EINVAL, "it is not a regular file")
    # A unique name, so that several processes and threads may write the same file; the last one wins.
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
    """A hidden empty folder to write into: renamed to `path` if the block succeeds, deleted if it fails.

    `check(path)` raises if an existing `path` must not be replaced; it runs before and after the block. While the
    block runs, another process that writes the same folder gets a BlockingIOError.
    """
    path = Path(os.path.realpath(path))
    if not path.name:
        raise OSError(errno.EINVAL, "it is the root of the file system")
    part = part_of(path)
    with made_folder(path.parent), _claimed(part):
        try:
            _recover(path)
            check(path)
            yield part
            check(path)
            commit_folder(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Create a folder and those above it; if the block fails, the new ones are deleted as far as they are empty."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def part_of(path: Path) -> Path:
    """Where a folder is written before `commit_folder` renames it."""
    return path.with_name(f".{path.name}.part")


def commit_folder(path: Path) -> None:
    """Sync everything in `part_of(path)` and rename it to `path`; an existing folder is deleted."""
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
    """Delete a folder; it is renamed first, so that a partly deleted one is not found under its name."""
    gone = path.with_name(f".{path.name}.gone")
    remove(gone)
    os.replace(path, gone)
    remove(gone)


def remove(path: Path) -> None:
    """Delete a folder, a file or a link as far as possible; nothing is deleted through a link."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete temporary files and folders of killed processes in `folder`. Nothing else may be writing there."""
    for path in sorted(folder.glob(".*.old")):
        _recover(path.with_name(path.name[1 : -len(".old")]))
    for suffix in (".part", ".gone"):
        for path in folder.glob(f".*{suffix}"):
            remove(path)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
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
    """Restore the old folder if a process stopped between moving it away and moving the new one in."""
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
    """Create and lock the folder, and empty it."""
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
        raise BlockingIOError(
            errno.EAGAIN, f"another run is writing to '{part}'; wait for it to finish, or choose another folder"
        )

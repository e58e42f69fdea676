"""Trails: checkpoints of a memory, from which it can be restored exactly.

    FOLDER/book.memory          a memory file; its notes list the checkpoints of its trail
    FOLDER/trail/ID.memory      a checkpoint: also a memory file; memories with a common history share it

A checkpoint is never changed, and a memory file lists its own trail. So saving, forking and rewinding are one atomic
write each, and a checkpoint that no memory lists is garbage, which `collect` deletes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_recurrent.errors import BlockRecurrentError, FileFormatError, InputError
from block_recurrent.inference.session import Session
from block_recurrent.inference.session_file import check_target, read_memory_file, save_session
from block_recurrent.model.memory_file import load_header, save_memory

FOLDER, SUFFIX, LOCK = "trail", ".memory", ".lock"


@dataclass(frozen=True)
class Place:
    """One checkpoint."""

    position: int
    """Number of tokens read and generated up to there."""
    id: str
    prefix: str | None = None
    """Hash of the tokens up to there, if reading them again would give the same checkpoint bit for bit."""


@dataclass(frozen=True)
class Trail:
    """The checkpoints of one memory, oldest first."""

    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, notes: dict[str, Any]) -> Trail:
        """The trail in the notes of a memory file."""
        try:
            return cls(tuple(Place(int(at), str(key), prefix) for at, key, prefix in notes.get("trail", ())))
        except (TypeError, ValueError, OverflowError):
            raise FileFormatError("its trail is not a list of checkpoints") from None

    def to_notes(self) -> dict[str, Any]:
        return {"trail": [[place.position, place.id, place.prefix] for place in self.places]}

    def add(self, place: Place, keep: int) -> Trail:
        """With one more checkpoint, and at most `keep`: the newest half, and the older ones spread evenly."""
        places = [old for old in self.places if old.position < place.position] + [place]
        while len(places) > keep:
            older = range(1, max(2, len(places) - keep // 2))
            gaps = {i: places[min(i + 1, len(places) - 1)].position - places[i - 1].position for i in older}
            places.pop(min(gaps, key=gaps.__getitem__) if keep > 1 else 0)
        return Trail(tuple(places))

    def until(self, position: int) -> Trail:
        """The checkpoints before this one."""
        return Trail(tuple(place for place in self.places if place.position < position))

    def at(self, position: int) -> Place:
        """The checkpoint at this position; an error lists the available ones."""
        for place in self.places:
            if place.position == position:
                return place
        there = ", ".join(str(place.position) for place in self.places) or "none"
        raise InputError(f"there is no checkpoint at position {position}: it must be one of {there}")


def checkpoint_path(folder: Path, place: Place) -> Path:
    """The path of a checkpoint of the memories in a folder."""
    if not (place.id.isalnum() and place.id.isascii()):
        raise FileFormatError(f"a trail has an invalid checkpoint id {place.id!r}")
    return folder / FOLDER / f"{place.id}{SUFFIX}"


def save_checkpoint(session: Session, folder: Path, prefix: str | None = None) -> Place:
    """Save the session as a checkpoint of the memories in a folder."""
    place = Place(session.position, uuid.uuid4().hex, prefix)
    path = checkpoint_path(folder, place)
    path.parent.mkdir(exist_ok=True)
    save_session(session, path)
    return place


def places_of(path: Path) -> tuple[Place, ...]:
    """The checkpoints that a memory file can be rewound to."""
    places = Trail.of(read_memory_file(path).notes).places
    return tuple(place for place in places if checkpoint_path(path.parent, place).is_file())


def continued(path: str | Path | None, out: Path) -> Trail:
    """The trail of a memory that continues the one in `path`: checkpoints are shared within a folder only."""
    if path is None or Path(path).parent.resolve() != out.parent.resolve():
        return Trail()
    return Trail(places_of(Path(path)))


def rewind(path: Path, position: int, out: Path) -> None:
    """Write the exact memory at an earlier checkpoint; in the same folder, with the trail up to there."""
    file = read_memory_file(path)
    trail = Trail(places_of(path))
    place = trail.at(position)
    earlier = read_memory_file(checkpoint_path(path.parent, place))
    if (earlier.tokens, earlier.model_hash) != (position, file.model_hash):
        raise FileFormatError(
            f"'{earlier.path}' is not the checkpoint of '{path}' at {position} tokens: it was replaced"
        )
    same_folder = out.parent.resolve() == path.parent.resolve()
    notes = file.notes | Trail((*trail.until(position).places, place) if same_folder else ()).to_notes()
    check_target(out)
    save_memory(earlier.state.memory, out, load_header(earlier.path)["extra"] | {"notes": notes})


def collect(folder: Path) -> None:
    """Delete unused checkpoints, and temporary files of killed processes. Nothing else may write there."""
    named, is_complete = set(), True
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            named |= {place.id for place in Trail.of(load_header(path)["extra"]["notes"]).places}
        except (BlockRecurrentError, KeyError, TypeError, AttributeError):
            is_complete = False  # the checkpoints of a damaged memory are what is left of it
    for path in (folder / FOLDER).glob(f"*{SUFFIX}") if is_complete else ():
        if path.name.removesuffix(SUFFIX) not in named:
            path.unlink()
    for path in [*folder.glob(".*.part"), *(folder / FOLDER).glob(".*.part")]:
        path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; an error if another process has it."""
    import fcntl

    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileFormatError(
                f"the folder '{folder}' is in use by another process, perhaps 'brt serve': stop it, or use its API"
            ) from None
        yield
    finally:
        os.close(handle)

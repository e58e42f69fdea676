"""Trails: places in a memory's past that it can be set back to exactly.

    FOLDER/book.memory          a memory file; its notes name the checkpoints of its trail
    FOLDER/trail/ID.memory      a checkpoint: a memory file too; memories that share a past share it

A checkpoint is never changed, and a memory file names its trail itself. So saving, forking and rewinding are one atomic
write each, and a checkpoint that no memory names is rubbish, which `collect` deletes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """Tokens read and written by then."""
    id: str
    prefix: str | None = None
    """Hash of the tokens up to there, where reading them again would give the same checkpoint to the last bit."""


@dataclass(frozen=True)
class Trail:
    """The checkpoints of one memory, oldest first."""

    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, notes: dict[str, Any]) -> Trail:
        """The trail that a memory file names in its notes."""
        return cls(tuple(Place(int(at), str(key), prefix) for at, key, prefix in notes.get("trail", ())))

    def to_notes(self) -> dict[str, Any]:
        return {"trail": [[place.position, place.id, place.prefix] for place in self.places]}

    def add(self, place: Place, keep: int) -> Trail:
        """With one more place, and at most `keep`: the newest half as they came, the older ones spread evenly."""
        places = [old for old in self.places if old.position < place.position] + [place]
        while len(places) > keep:
            older = range(1, max(2, len(places) - keep // 2))
            gaps = {i: places[min(i + 1, len(places) - 1)].position - places[i - 1].position for i in older}
            places.pop(min(gaps, key=gaps.__getitem__) if keep > 1 else 0)
        return Trail(tuple(places))

    def until(self, position: int) -> Trail:
        """The places before this one."""
        return Trail(tuple(place for place in self.places if place.position < position))

    def at(self, position: int) -> Place:
        """The place at this position; an error says which there are."""
        for place in self.places:
            if place.position == position:
                return place
        there = ", ".join(str(place.position) for place in self.places) or "none"
        raise InputError(f"there is no checkpoint at position {position}: it must be one of the trail's ({there})")


def checkpoint_path(folder: Path, place: Place) -> Path:
    """Where a checkpoint of the memories in a folder lies."""
    if not (place.id.isalnum() and place.id.isascii()):
        raise FileFormatError(f"a trail names the checkpoint {place.id!r}: such a name can't be one")
    return folder / FOLDER / f"{place.id}{SUFFIX}"


def save_checkpoint(session: Session, folder: Path, prefix: str | None = None) -> Place:
    """Write where the session stands as a checkpoint of the memories in a folder."""
    place = Place(session.position, uuid.uuid4().hex, prefix)
    path = checkpoint_path(folder, place)
    path.parent.mkdir(exist_ok=True)
    save_session(session, path)
    return place


def places_of(path: Path) -> tuple[Place, ...]:
    """The checkpoints that a memory file can be set back to."""
    places = Trail.of(read_memory_file(path).notes).places
    return tuple(place for place in places if checkpoint_path(path.parent, place).is_file())


def rewind(path: Path, position: int, out: Path) -> None:
    """Write the memory of an earlier place, exactly as it was; with the trail up to there in the same folder."""
    file = read_memory_file(path)
    trail = Trail(places_of(path))
    place = trail.at(position)
    earlier = read_memory_file(checkpoint_path(path.parent, place))
    same_folder = out.parent.resolve() == path.parent.resolve()
    notes = file.notes | Trail((*trail.until(position).places, place) if same_folder else ()).to_notes()
    check_target(out)
    save_memory(earlier.state.memory, out, load_header(earlier.path)["extra"] | {"notes": notes})


def collect(folder: Path) -> None:
    """Delete the checkpoints that no memory names, and what killed processes left. Nothing else may write there."""
    named = set()
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(BlockRecurrentError, KeyError, TypeError, ValueError):  # a damaged memory names none
            named |= {place.id for place in Trail.of(load_header(path)["extra"]["notes"]).places}
    for path in (folder / FOLDER).glob(f"*{SUFFIX}"):
        if path.name.removesuffix(SUFFIX) not in named:
            path.unlink()
    for path in [*folder.glob(".*.part"), *(folder / FOLDER).glob(".*.part")]:
        path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone; an error if another has it."""
    import fcntl

    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileFormatError(
                f"the folder '{folder}' is in use by another process, perhaps 'brt serve': stop it first, or ask it"
            ) from None
        yield
    finally:
        os.close(handle)

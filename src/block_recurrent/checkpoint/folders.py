"""Checkpoint folders: written atomically, and hashed."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_recurrent.errors import CheckpointError, FileFormatError, NotFoundError
from block_recurrent.io import atomic, door
from block_recurrent.io.atomic import part_of as aside_of
from block_recurrent.io.door import MANIFEST

FORMAT = "block-recurrent checkpoint"
VERSION = 2
_RULES: dict[str, door.Rule] = {
    "step": door.is_count,
    "validation_bits": lambda bits: bits is None or door.is_number(bits),
    "files": door.is_files,
}
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its manifest has been read and the hash of every file matches."""

    path: Path
    step: int
    validation_bits: float | None
    """Bits per token on the validation split at this step, if measured."""


def find_checkpoint(
    run: Path, which: str | Path = "last", check: Callable[[Path], Checkpoint] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """An intact checkpoint of a run, and notes about damaged ones; None if the run has no checkpoints.

    check: the function that verifies a checkpoint (default: `verify`).
    """
    check = check or verify
    if str(which) not in ("last", "best"):
        return check(Path(which)), []
    notes: list[str] = []
    whole: list[Checkpoint] = []
    for path in reversed(list_checkpoints(run)):
        try:
            whole.append(check(path))
        except CheckpointError as error:
            notes.append(str(error))
        if whole and which == "last":
            return whole[0], [f"{note}; using step {whole[0].step} instead" for note in notes]
    measured = [c for c in whole if c.validation_bits is not None]
    if which == "best" and measured:
        return min(measured, key=lambda c: (c.validation_bits, -c.step)), notes
    if which == "best" and whole:
        raise CheckpointError(f"no checkpoint of '{run}' has a validation result: use 'last'")
    if notes:
        raise CheckpointError(f"no checkpoint of '{run}' can be used: {'; '.join(notes)}")
    return None, notes


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, intact or damaged."""
    folder = run / "checkpoints"
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in paths if _STEP_FOLDER.fullmatch(p.name)), key=step_of)


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int:
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def verify(path: Path) -> Checkpoint:
    """The checkpoint, after verifying the hashes of its manifest and files; a CheckpointError describes any problem."""
    manifest = read_manifest(path)
    try:
        door.check_files(path, manifest["files"])
    except (FileFormatError, OSError) as error:
        raise CheckpointError(f"checkpoint '{path}' is damaged: {error}") from None
    return Checkpoint(path, manifest["step"], manifest["validation_bits"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder; its files are not checked. Manifests of version 1 have no seal."""
    try:
        manifest = door.read_manifest(path / MANIFEST, FORMAT, {1: _RULES, VERSION: _RULES})
    except (FileNotFoundError, NotADirectoryError):
        reason = f"it has no {MANIFEST}" if path.is_dir() else "the folder does not exist"
        raise NotFoundError(f"'{path}' is not a checkpoint: {reason}") from None
    except (FileFormatError, OSError) as error:
        raise CheckpointError(f"checkpoint '{path}' is damaged: {error}") from None
    if _STEP_FOLDER.fullmatch(path.name) and step_of(path) != manifest["step"]:
        raise CheckpointError(f"checkpoint '{path}' is damaged: its {MANIFEST} belongs to step {manifest['step']}")
    return manifest


def finish(path: Path, step: int, validation_bits: float | None) -> None:
    """Add the manifest to the temporary folder of `path`, sync it, and rename it to `path`."""
    write_manifest(aside_of(path), step, validation_bits)
    atomic.commit_folder(path)


def write_manifest(folder: Path, step: int, validation_bits: float | None) -> None:
    """Add the manifest to a folder that has all other files."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "validation_bits": validation_bits if validation_bits is None or math.isfinite(validation_bits) else None,
        "files": dict(sorted(door.list_files(folder).items())),
    }
    (folder / MANIFEST).write_text(door.seal_json(json.dumps(manifest, indent=1)))


def sweep(run: Path) -> None:
    """Delete unfinished and partly deleted checkpoints of killed processes."""
    atomic.sweep(run / "checkpoints")


def prune(run: Path, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` and the best on validation."""
    paths = list_checkpoints(run)
    measured = [(bits, -step_of(p), p) for p in paths if (bits := _validation_bits(p)) is not None]
    best = min(measured)[2] if measured else None
    for path in paths[:-keep]:
        if path != best:
            atomic.remove_folder(path)


def _validation_bits(path: Path) -> float | None:
    try:
        return read_manifest(path)["validation_bits"]
    except CheckpointError:
        return None


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint so that it is not used, and not deleted."""
    names = (f"{why}-{path.name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    place = next(place for place in map(path.with_name, names) if not os.path.lexists(place))
    os.replace(path, place)
    return place

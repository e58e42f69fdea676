"""Checkpoint folders: whole or not there at all, and hashed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_recurrent.errors import CheckpointError
from block_recurrent.io import atomic
from block_recurrent.io.atomic import part_of as aside_of

FORMAT = "block-recurrent checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: its manifest has been read and every file has the hash that it should have."""

    path: Path
    step: int
    validation_bits: float | None
    """Bits per token on the validation split at this step, where they were measured."""


def find_checkpoint(run: Path, which: str | Path = "last") -> tuple[Checkpoint | None, list[str]]:
    """A whole checkpoint of a run, and what was found damaged on the way; None if the run has none at all."""
    if str(which) not in ("last", "best"):
        return verify(Path(which)), []
    notes: list[str] = []
    whole: list[Checkpoint] = []
    for path in reversed(list_checkpoints(run)):
        try:
            whole.append(verify(path))
        except CheckpointError as error:
            notes.append(str(error))
        if whole and which == "last":
            return whole[0], notes
    measured = [c for c in whole if c.validation_bits is not None]
    if which == "best" and measured:
        return min(measured, key=lambda c: (c.validation_bits, -c.step)), notes
    if which == "best" and whole:
        raise CheckpointError(f"no checkpoint of '{run}' was measured on validation: use 'last'")
    if notes:
        raise CheckpointError(f"no checkpoint of '{run}' is whole: {'; '.join(notes)}")
    return None, notes


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, whole or damaged."""
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
    """The checkpoint, after checking every file against the manifest; a CheckpointError says what is wrong."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint '{path}' is damaged: {name} is missing")
        if _sha256(file) != expected:
            raise CheckpointError(f"checkpoint '{path}' is damaged: {name} does not have the hash that it should have")
    return Checkpoint(path, manifest["step"], manifest["validation_bits"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder; its files are not looked at."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or not isinstance(manifest["files"], dict):
            raise KeyError("format")
        step, _ = manifest["step"], manifest["validation_bits"]
    except FileNotFoundError:
        reason = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"'{path}' is not a checkpoint: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint '{path}' is damaged: its {MANIFEST} can't be read ({error!r})") from None
    if manifest["version"] != VERSION:
        raise CheckpointError(
            f"checkpoint '{path}' has format version {manifest['version']}, this program reads {VERSION}"
        )
    if _STEP_FOLDER.fullmatch(path.name) and step_of(path) != step:
        raise CheckpointError(f"checkpoint '{path}' is damaged: its {MANIFEST} is that of step {step}")
    return manifest


def finish(path: Path, step: int, validation_bits: float | None) -> None:
    """Give what was written to `aside_of(path)` its manifest, sync it, and put it in its place."""
    aside = aside_of(path)
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "validation_bits": validation_bits,
        "files": {str(p.relative_to(aside)): _sha256(p) for p in files},
    }
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    atomic.commit_folder(path)


def sweep(run: Path) -> None:
    """Delete what killed processes left: checkpoints that were never finished, or not quite deleted."""
    atomic.sweep(run / "checkpoints")


def prune(run: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` and the best on validation."""
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
    place = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(place, ignore_errors=True)
    os.replace(path, place)
    return place


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

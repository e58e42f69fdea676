"""Checkpoint folders: whole or not there at all, hashed, and readable by every command. And `load_run`.

A run is a folder:

    config.toml                     the resolved configuration
    tokenizer.model                 the SentencePiece file (none: bytes)
    metrics.jsonl, log.txt          what happened
    checkpoints/step-00001000/      manifest.json (step, validation, SHA-256 of every other file),
                                    model.safetensors, and what training needs to go on

A checkpoint is written into a hidden folder beside its place, synced and renamed, so that a crash at any moment leaves
either no checkpoint or a whole one. A sharded run has `sharded/` (torch.distributed.checkpoint) instead of
model.safetensors; `brt export` makes one file of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from block_recurrent.data import load_tokenizer
from block_recurrent.errors import CheckpointError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.run_config import RunConfig, read_toml

if TYPE_CHECKING:
    from block_recurrent.data import Tokenizer

FORMAT = "block-recurrent checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SHARDED = "sharded"
WEIGHT_PREFIX = "model/"
"""Of the names of weights in a sharded checkpoint, which holds other tensors too."""
CONFIG = "config.toml"
TOKENIZER = "tokenizer.model"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: its manifest has been read and every file has the hash that it should have."""

    path: Path
    step: int
    validation_bits: float | None
    """Bits per token on the validation split at this step, where they were measured."""


@dataclass(frozen=True)
class LoadedRun:
    """What evaluation and generation need of a run."""

    model: BlockRecurrentLM
    config: RunConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
    """Things that a user should be told: a damaged checkpoint that was passed over."""


def load_run(run: str | Path, checkpoint: str | Path = "last", device: torch.device | str = "cpu") -> LoadedRun:
    """The model of a run, ready for reading (eval mode), with its configuration and tokenizer.

    run: the run's folder, or one of its checkpoint folders. checkpoint: "last", "best" (on validation), or a checkpoint
    folder.
    """
    run = Path(run)
    if (run / MANIFEST).is_file():
        run, checkpoint = run.parent.parent, run
    config = RunConfig.from_dict(read_toml(_existing_config(run)))
    found, notes = find_checkpoint(run, checkpoint)
    if found is None:
        raise CheckpointError(f"'{run}' has no checkpoint yet: train it further with 'brt train'")
    model = BlockRecurrentLM(config.model)
    _assign_weights(model, found.path)
    tokenizer = load_tokenizer(run / TOKENIZER if (run / TOKENIZER).is_file() else "bytes")
    return LoadedRun(model.to(device).eval(), config, tokenizer, found, tuple(notes))


def export(run: str | Path, out: Path, checkpoint: str | Path = "last") -> LoadedRun:
    """Write the weights of a run as one safetensors file, with the model's configuration in its metadata."""
    loaded = load_run(run, checkpoint)
    header = {"config": json.dumps(loaded.config.model.to_dict()), "step": str(loaded.checkpoint.step)}
    aside = out.with_name(f".{out.name}.part")
    try:
        write_tensors(aside, loaded.model.state_dict(), header)
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return loaded


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


def aside_of(path: Path) -> Path:
    """Where a checkpoint is written before it is renamed."""
    return path.with_name(f".{path.name}.part")


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
    for p in [*files, aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside]:
        _sync(p)
    if path.exists():
        remove(path)
    os.replace(aside, path)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted does not look like one."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(run: Path) -> None:
    """Delete what killed processes left: checkpoints that were never finished, or not quite deleted."""
    folder = run / "checkpoints"
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".step-"):
            shutil.rmtree(path, ignore_errors=True)


def prune(run: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` and the best on validation."""
    paths = list_checkpoints(run)
    measured = [(bits, -step_of(p), p) for p in paths if (bits := _validation_bits(p)) is not None]
    best = min(measured)[2] if measured else None
    for path in paths[:-keep]:
        if path != best:
            remove(path)


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


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file; a disk that is full is an OSError."""
    plain = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    try:
        save_file(plain, path, metadata)
        path.chmod(0o644)  # safetensors makes files that only their owner can read
    except SafetensorError as error:
        raise OSError(str(error)) from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint folder, whole, on the CPU."""
    if (path / WEIGHTS).is_file():
        return load_file(path / WEIGHTS)
    from torch.distributed import checkpoint as dcp

    known = dcp.FileSystemReader(path / SHARDED).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(WEIGHT_PREFIX) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    read_sharded(wanted, path)
    return {name.removeprefix(WEIGHT_PREFIX): x for name, x in wanted.items()}


def read_sharded(tensors: dict[str, Any], path: Path) -> None:
    """Fill tensors, sharded or whole, with those of the same names in a sharded checkpoint."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # and we are a single process
        alone = not torch.distributed.is_initialized()
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path / SHARDED), no_dist=alone)


def _assign_weights(model: BlockRecurrentLM, path: Path) -> None:
    weights = read_weights(path)
    own = model.state_dict()
    if different := sorted(own.keys() ^ weights.keys()):
        raise CheckpointError(
            f"the weights in '{path}' are not those of this model: '{different[0]}' is in only one of them"
        )
    for name, x in weights.items():
        if own[name].shape != x.shape:
            raise CheckpointError(
                f"the weights in '{path}' are not those of this model: '{name}' is {tuple(x.shape)} there, "
                f"{tuple(own[name].shape)} here"
            )
    model.load_state_dict(weights)


def _existing_config(run: Path) -> Path:
    if not (run / CONFIG).is_file():
        raise CheckpointError(f"'{run}' is not a run: it has no {CONFIG}; 'brt train --out {run}' makes one")
    return run / CONFIG


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

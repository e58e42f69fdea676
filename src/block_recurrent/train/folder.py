"""A run's folder: one process at a time, its configuration, its tokenizer, and where it goes on from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from block_recurrent.checkpoint import (
    CONFIG,
    MANIFEST,
    TOKENIZER,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    set_aside,
    step_of,
    sweep,
    verify,
)
from block_recurrent.data import Tokenizer
from block_recurrent.errors import CheckpointError, ConfigError, TrainingError
from block_recurrent.io.atomic import atomic_file
from block_recurrent.run_config import RunConfig, differences, read_toml

LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run's folder. The kernel lets go of the lock when the process ends, however it ends."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise TrainingError(f"'{run}' can't be used as a run's folder: {error.strerror or error}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode() or "unknown"
        os.close(handle)
        raise TrainingError(
            f"another process ({holder}) is training in '{run}': wait for it, or choose another --out"
        ) from None
    try:
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        os.close(handle)


def open_run(run: Path, config: RunConfig, tokenizer: Tokenizer, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """Decide where a run starts, and make its folder say so. Returns the checkpoint to go on from, and what to tell."""
    sweep(run)
    start, notes = _starting_point(run, config, resume)
    for path in list_checkpoints(run):
        if start is None or step_of(path) > start.step:
            notes.append(f"'{path}' is not gone on from; it is kept as '{set_aside(path, 'unused').name}'")
    _write_whole(run / CONFIG, config.to_toml().encode())
    if tokenizer.model is None:
        (run / TOKENIZER).unlink(missing_ok=True)
    else:
        _write_whole(run / TOKENIZER, tokenizer.model)
    return start, notes


def _starting_point(run: Path, config: RunConfig, resume: str) -> tuple[Checkpoint | None, list[str]]:
    steps = [step_of(path) for path in list_checkpoints(run)]
    if resume == "never":
        if steps:
            raise TrainingError(
                f"'{run}' has checkpoints up to step {steps[-1]}, and --resume never was given: choose another --out, "
                "or leave --resume out to go on"
            )
        return None, []
    if resume not in ("auto", "must"):
        path = Path(resume)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"--resume {resume}: it must be auto, never, must, or the folder of a checkpoint")
        _refuse_differences(path.parent.parent, config)
        return verify(path), []
    if steps:
        _refuse_differences(run, config)
        return find_checkpoint(run)
    if resume == "must":
        raise CheckpointError(f"'{run}' has no checkpoint to go on from, and --resume must was given")
    return None, []


def _refuse_differences(run: Path, config: RunConfig) -> None:
    if not (run / CONFIG).is_file():
        raise CheckpointError(f"'{run}' has checkpoints, but no {CONFIG} that says what they are of")
    different = differences(RunConfig.from_dict(read_toml(run / CONFIG)), config)
    if different:
        raise ConfigError(
            f"'{run}' was trained with another configuration: {'; '.join(different)}; choose another --out, or "
            "take its weights only, with --init-from"
        )


def _write_whole(path: Path, content: bytes) -> None:
    try:
        with atomic_file(path) as aside:
            aside.write_bytes(content)
    except OSError as error:
        raise TrainingError(f"'{path}' can't be written: {error.strerror or error}") from None

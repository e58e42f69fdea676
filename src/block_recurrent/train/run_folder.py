"""The run folder: its lock, configuration and tokenizer, and the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from block_recurrent import models
from block_recurrent.checkpoint import (
    CONFIG,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    read_config,
    read_manifest,
    set_aside,
    step_of,
    sweep,
    write_run_files,
)
from block_recurrent.data import Tokenizer
from block_recurrent.errors import CheckpointError, ConfigError, TrainingError
from block_recurrent.io.atomic import made_folder
from block_recurrent.io.door import is_utf8, read_bytes
from block_recurrent.run_config import RunConfig, differences

LOCK = ".lock"
RESUME = ("auto", "never", "must")


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock the run folder. The kernel releases the lock when the process ends, for whatever reason.

    If the block fails before the folder has any other file, nothing is left of what was made here.
    """
    _refuse_other_folders(run)
    with ExitStack() as stack:
        try:
            stack.enter_context(made_folder(run))
            # Not through a link, which may lead to any file: the lock file is overwritten.
            handle = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise TrainingError(f"'{run}' can't be used as a run folder: {error.strerror or error}") from None
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink == 0:  # a process that failed has deleted it in the meantime
                raise BlockingIOError
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace") or "unknown"
            raise TrainingError(
                f"another process ({holder}) is training in '{run}': wait for it, or choose another --out"
            ) from None
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        try:
            yield
        except BaseException:
            if os.listdir(run) == [LOCK]:
                (run / LOCK).unlink()
            raise


def _refuse_other_folders(run: Path) -> None:
    """Accept a folder that is empty or contains a run, with a name that safetensors can open."""
    if not is_utf8(run):
        raise TrainingError(f"--out '{run}' is not UTF-8: choose another name")
    for path in sorted(run.iterdir()) if run.is_dir() else ():
        # Through a link another file would be written over, and opening a pipe would wait.
        if not path.is_dir() and (path.is_symlink() or (path.exists() and not path.is_file())):
            raise TrainingError(f"--out '{run}' contains '{path.name}', which is not a regular file: remove it")
        if path.name == "checkpoints" and not path.is_dir():
            raise TrainingError(f"--out '{run}' contains a file named 'checkpoints', where a run has a folder: move it")
    # Only the lock and the temporary file of its configuration may be there without a configuration.
    names = {path.name for path in run.iterdir()} if run.is_dir() else set()
    others = {name for name in names if name != LOCK and not name.endswith(".part")}
    if others and not _is_run(run):
        raise TrainingError(f"--out '{run}' contains '{min(others)}' and is not a run folder: choose another --out")


def _is_run(run: Path) -> bool:
    """Whether its config.toml, damaged or not, is the configuration of a run: not of another program, not that of a
    packed model, and not a copy to edit, none of which have a lock or checkpoints."""
    if not ((run / LOCK).exists() or list_checkpoints(run)):
        return False
    try:
        text = read_bytes(run / CONFIG).decode(errors="replace")
    except OSError:
        return False
    return all(f"[{section}]" in text for section in ("model", "train", "schedule"))


def check_resume(resume: str) -> None:
    """Raise an error, before the folder of the run is made, if it can't be a way to resume."""
    try:
        if resume not in RESUME:
            read_manifest(Path(resume))
    except CheckpointError as error:
        raise ConfigError(f"--resume must be {', '.join(RESUME)}, or a checkpoint folder: {error}") from None


def starting_point(
    run: Path, config: RunConfig, resume: str, check: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, list[str]]:
    """Decide where a run starts. Returns the checkpoint to resume from, which passes `check`, and notes."""
    sweep(run)
    start, notes = _starting_point(run, config, resume, check)
    _refuse_other_origin(run, start, config.train.init_from)
    return start, notes


def open_run(run: Path, config: RunConfig, tokenizer: Tokenizer, start: Checkpoint | None) -> list[str]:
    """Prepare the folder of a run that has loaded its starting point. Returns notes."""
    notes = []
    for path in list_checkpoints(run):
        if start is None or step_of(path) > start.step:
            notes.append(f"not resuming from '{path}'; it was renamed to '{set_aside(path, 'unused').name}'")
    if start is not None:
        config = config.replace("train", init_from=_origin_of(start))
    write_run_files(run, config, tokenizer, TrainingError)
    return notes


def _starting_point(
    run: Path, config: RunConfig, resume: str, check: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, list[str]]:
    steps = [step_of(path) for path in list_checkpoints(run)]
    if resume == "never":
        if steps:
            raise TrainingError(
                f"'{run}' has checkpoints up to step {steps[-1]}, and --resume never was given: choose another --out, "
                "or omit --resume to continue the run"
            )
        return None, []
    if resume not in ("auto", "must"):
        _refuse_differences(Path(resume).parent.parent, config)
        return check(Path(resume)), []
    if steps:
        _refuse_differences(run, config)
        return find_checkpoint(run, check=check)
    if resume == "must":
        raise CheckpointError(f"'{run}' has no checkpoint to resume from, and --resume must was given")
    return None, []


def _refuse_other_origin(run: Path, start: Checkpoint | None, given: str) -> None:
    """Raise an error if a run would start from itself, or resume with weights that are not of the given origin."""
    if not given:
        return
    origin = _origin_of(start) if start else None
    if origin is None:
        is_refused = _place_of(given) == run.resolve()
    else:
        is_refused = given != origin and (origin == "" or _place_of(given) != _place_of(origin))
    if is_refused:
        raise ConfigError(
            f"'{run}' did not start from '{given}': omit --init-from to resume the run, or choose another --out"
        )


def _origin_of(start: Checkpoint) -> str:
    return read_config(start.path.parent.parent).train.init_from


def _place_of(source: str) -> Path:
    return models.locate(source)[0].resolve()


def _refuse_differences(run: Path, config: RunConfig) -> None:
    different = differences(read_config(run), config)
    if different:
        raise ConfigError(
            f"'{run}' was trained with another configuration: {'; '.join(different)}; choose another --out, or "
            "load only its weights, with --init-from"
        )

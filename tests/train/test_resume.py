"""A run that was stopped, in any way, ends with the same bits as one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.checkpoint import list_checkpoints, step_of
from block_recurrent.run_config import RunConfig
from block_recurrent.train import state
from block_recurrent.train.loop import train
from block_recurrent.train.report import Reporter

from .conftest import FAMILIES, checkpoint_contents, read_metrics

STEPS = 12


class CrashError(Exception):
    """Stands for a program that dies: nothing is saved."""


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """`at_step(5, action)`: do something when the line of step 5 has been written."""
    original = Reporter.metrics

    def plan(step: int, action: Callable[[], None]) -> None:
        def metrics(self: Reporter, record: dict[str, Any]) -> None:
            original(self, record)
            if record["step"] == step and record["split"] == "train":
                action()

        monkeypatch.setattr(Reporter, "metrics", metrics)

    return plan


def crash() -> None:
    raise CrashError


def assert_same_run(run: Path, expected: Path, step: int = STEPS) -> None:
    """Every number that was written, and every bit of the last checkpoint."""
    assert read_metrics(run) == read_metrics(expected)
    assert checkpoint_contents(run, step) == checkpoint_contents(expected, step)


def stop_and_go_on(config: RunConfig, run: Path, at_step: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(config, run) is False
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(config, run) is False
    at_step(11, crash)
    with pytest.raises(CrashError):
        train(config, run)
    monkeypatch.undo()
    assert train(config, run) is True


@pytest.mark.parametrize("system", FAMILIES)
def test_every_family(
    system: str,
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    at_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(system)
    assert config.model.dropout > 0
    assert config.model.attention_dropout > 0
    assert train(config, tmp_path / "whole") is True
    stop_and_go_on(config, tmp_path / "parts", at_step, monkeypatch)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    "settings",
    [
        {"train.bptt": 2, "train.clip": 0.5, "schedule.kind": "cosine"},
        {"train.accumulate": 2, "optimizer.name": "adamw", "optimizer.weight_decay": 0.1},
        {"optimizer.name": "muon", "data.excerpt": 128},
        {"train.checkpoint_activations": True, "optimizer.momentum": 0.0},
    ],
    ids=["bptt", "accumulate-adamw", "muon-excerpts", "activations"],
)
def test_every_way_of_working(
    settings: dict[str, Any],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    at_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = "memorizing" if "train.accumulate" in settings else "rec-lstm-single"
    config = make_config(system, **settings)
    train(config, tmp_path / "whole")
    stop_and_go_on(config, tmp_path / "parts", at_step, monkeypatch)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


KILLED_WHILE_SAVING = """
import json, os, signal, sys
from pathlib import Path
from block_recurrent.checkpoint import folders
from block_recurrent.run_config import RunConfig
from block_recurrent.train import loop, state

run, moment = Path(sys.argv[1]), sys.argv[2]
config = RunConfig.from_dict(json.load(sys.stdin))

def deadly(function, wanted):
    def replacement(*args, **kwargs):
        if (run / "checkpoints" / ".step-00000008.part").exists() and wanted(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return replacement

if moment == "weights":      # between two files
    state.write_tensors = deadly(state.write_tensors, lambda path, *_: path.name == "optimizer.safetensors")
elif moment == "manifest":   # all files are there, the manifest is not
    folders.door.sha256_of = deadly(folders.door.sha256_of, lambda path: True)
else:                        # the last moment before it counts
    folders.os.replace = deadly(os.replace, lambda source, target: str(source).endswith(".part"))
loop.train(config, run)
"""


@pytest.mark.parametrize(
    ("system", "moment"),
    [(system, ("weights", "manifest", "rename")[i % 3]) for i, system in enumerate(FAMILIES)],
)
def test_killed_while_saving(system: str, moment: str, make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config, run = make_config(system), tmp_path / "killed"
    train(config, tmp_path / "whole")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(run), moment],
        input=json.dumps(config.to_dict()).encode(),
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [p.name for p in (run / "checkpoints").iterdir() if not p.name.startswith(".")] == [
        "step-00000004",
        "step-00000006",
    ]
    assert train(config, run) is True
    assert_same_run(run, tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*")), "what the killed run left has been swept away"


@pytest.mark.parametrize("interrupted", [False, True])
def test_training_goes_on_while_a_checkpoint_is_written(
    interrupted: bool,
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    at_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of step 8 is finished after step 10, with the numbers of step 8; an older one is deleted only then.

    A second Ctrl-C at step 10 ends the run, and leaves that checkpoint complete.
    """
    config, run = make_config("memorizing", **{"train.keep": 2, "eval.every": 0}), tmp_path / "run"
    saved, finish, save = [], state.finish, state.TrainingState.save
    step_10 = threading.Event()

    def late(path: Path, step: int, bits: float | None) -> None:
        assert step != 8 or step_10.wait(timeout=60)
        saved.append((step, [step_of(path) for path in list_checkpoints(run)]))
        finish(path, step, bits)

    def action() -> None:
        step_10.set()
        if interrupted:
            raise KeyboardInterrupt

    def save_at_once(self: state.TrainingState, *args: Any) -> Path:
        path = save(self, *args)
        self.wait_for_save()
        return path

    with monkeypatch.context() as patch:
        patch.setattr(state.TrainingState, "save", save_at_once)
        train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(state, "finish", late)
        at_step(10, action)
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            train(config, run)
    wanted = [(4, []), (8, [4]), (12, [4, 8]), (12, [8, 12])]  # before and after the validation at the end
    assert saved == (wanted[:2] if interrupted else wanted)
    assert [step_of(path) for path in list_checkpoints(run)] == ([4, 8] if interrupted else [8, 12])
    assert checkpoint_contents(run, 8) == checkpoint_contents(tmp_path / "whole", 8)
    monkeypatch.undo()
    assert train(config, run) is True
    assert_same_run(run, tmp_path / "whole")


def test_a_copy_of_the_folder_goes_on_too(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make_config()
    train(config.replace("train", steps=6), tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    train(config, tmp_path / "first")
    train(config, tmp_path / "second")
    assert_same_run(tmp_path / "second", tmp_path / "first")

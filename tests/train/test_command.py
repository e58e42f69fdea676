"""`brt train` as users meet it: Ctrl-C, the same command again, and many processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from block_recurrent.checkpoint import load_run
from block_recurrent.cli.main import main
from block_recurrent.errors import USAGE

from .conftest import read_metrics

BRT = [sys.executable, "-m", "block_recurrent"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    usual = ["--system", "rec-fixed-skip", "--size", "micro", "--data", str(corpus), "--lanes", "2"]
    return ["train", *usual, "--out", str(out), "--eval-every", "0", "--eval-tokens", "64", *more]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if len(lines) >= step and any(run.glob("checkpoints/step-*")):  # it is written while training goes on
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 50 steps that was not stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(arguments(corpus, run, "--steps", "50", "--save-every", "0")) == 0
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_started_again(number: signal.Signals, whole: Path, corpus: Path, tmp_path: Path) -> None:
    command = arguments(corpus, tmp_path, "--steps", "50", "--save-every", "8")
    with subprocess.Popen([*BRT, *command], stderr=subprocess.PIPE, text=True, env=ENV) as process:
        wait_for_step(tmp_path, 10, process)
        process.send_signal(number)
        said = process.communicate()[1]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "stopped after step" in said
        assert f"to resume: brt {shlex.join(command)}\n" in said
    assert main(command) == 0
    assert "resuming after step" in (tmp_path / "log.txt").read_text()
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_a_run_keeps_its_own_settings(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not given comes from the run, not from the preset, which may have changed since; what is given counts."""
    adamw = ("--set", "optimizer.name=adamw", "--set", "schedule.kind=cosine")
    assert main(arguments(corpus, tmp_path, "--steps", "2", *adamw)) == 0
    assert main(arguments(corpus, tmp_path, "--steps", "3")) == 0
    config = load_run(tmp_path).config
    assert (config.optimizer.name, config.schedule.decay_steps, config.train.steps) == ("adamw", 2, 3)
    assert main(arguments(corpus, tmp_path, "--steps", "4", "--set", "optimizer.name=muon")) == 2
    assert "optimizer.name adamw -> muon" in capsys.readouterr().err


def test_torchrun(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launcher, "block_recurrent", *arguments(corpus, run, "--steps", "3", "--parallel", "fsdp")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=ENV, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 3/3") == 2, "only one process speaks: a line of training, and one of validation"
    assert load_run(run).checkpoint.step == 3


def test_export(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(corpus, tmp_path / "run", "--steps", "2")) == 0
    out = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert out.is_file()
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == USAGE
    assert "exists: give --overwrite" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(out), "--overwrite"]) == USAGE
    assert "is not a run" in capsys.readouterr().err

"""Metrics go to TensorBoard and to Weights & Biases where that is asked for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from block_recurrent.cli.main import main
from block_recurrent.errors import MissingExtraError, TrainingError
from block_recurrent.run_config import RunConfig
from block_recurrent.train.boards import WANDB_ID, named_numbers
from block_recurrent.train.loop import train
from block_recurrent.train.report import read_metrics


class StandIn:
    """What we call of wandb; keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0

    def init(self, **given: Any) -> Any:
        self.given.append(given)
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def _finish(self) -> None:
        self.finished += 1


def test_every_metric_goes_to_wandb(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, run = StandIn(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"train.wandb": "books", "train.wandb_offline": True}
    train(make_config(**settings | {"train.steps": 4}), run)
    train(make_config(**settings | {"train.steps": 6}), run)  # resumes
    assert wandb.finished == 2
    first, second = wandb.given
    assert first["project"] == "books"
    assert first["mode"] == "offline"
    assert first["id"] == second["id"] == (run / WANDB_ID).read_text().strip()
    assert first["config"]["model"]["vocab_size"] == 257
    lines = read_metrics(run)
    wanted = {(line["split"], line["step"]): line["bits_per_token"] for line in lines}
    got = {
        (name.split("/")[0], step): value
        for values, step in wandb.logged
        for name, value in values.items()
        if name.endswith("/bits_per_token")
    }
    assert {key: got[key] for key in wanted} == wanted


def test_without_the_flag_it_is_not_imported(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an error
    assert train(make_config(**{"train.steps": 1}), tmp_path / "run")
    with pytest.raises(MissingExtraError, match=r"--wandb needs the optional extra 'wandb'"):
        train(make_config(**{"train.steps": 1, "train.wandb": "books"}), tmp_path / "other")


def test_offline_files_of_the_real_package(corpus: Path, tmp_path: Path) -> None:
    """In a process of its own: wandb writes in the background, and is waited for when the process ends."""
    pytest.importorskip("wandb", reason="needs wandb")
    command = f"train --system rec-fixed-skip --size micro --data {corpus} --out {tmp_path / 'run'} --steps 2 --lanes 2"
    words = [*command.split(), "--wandb", "books", "--wandb-offline"]
    environment = os.environ | {"WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "block_recurrent", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while b"train/bits_per_token" not in file.read_bytes():
        assert time.monotonic() < deadline, "the metrics are not in wandb's file"
        time.sleep(0.2)


def test_tensorboard_by_flag(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"train --system slide --size micro --data {corpus} --steps 1 --lanes 2 --out {tmp_path / 'run'}"
    assert main([*command.split(), "--no-tensorboard"]) == 0
    assert not (tmp_path / "run" / "tensorboard").exists()
    code = main([*command.split(), "--tensorboard", "--steps", "2"])
    if importlib.util.find_spec("tensorboard") is None:
        assert code != 0
        assert "pip install 'block-recurrent[tensorboard]'" in capsys.readouterr().err
    else:
        assert any((tmp_path / "run" / "tensorboard").iterdir())


def test_numbers_are_named_by_their_split() -> None:
    record = {"split": "train", "step": 3, "bits_per_token": 2.5, "note": "text"}
    assert named_numbers(record) == {"train/bits_per_token": 2.5}


def test_what_wandb_refuses_is_one_line(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusedError(Exception):
        pass

    class Refusing(StandIn):
        Error = RefusedError

        def init(self, **given: Any) -> Any:
            raise RefusedError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", Refusing())
    with pytest.raises(TrainingError, match=r"^--wandb books: No API key configured\.$"):
        train(make_config(**{"train.steps": 1, "train.wandb": "books"}), tmp_path / "run")

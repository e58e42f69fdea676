"""Loggers for metrics besides metrics.jsonl: TensorBoard and Weights & Biases, imported only when used."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from block_recurrent.errors import MissingExtraError, TrainingError
from block_recurrent.io.door import first_line
from block_recurrent.run_config import RunConfig

WANDB_ID = "wandb-id.txt"
"""File with the run's id at Weights & Biases, so that a resumed run continues the same curves."""


class Board(Protocol):
    """Logs metrics. A record has `step` and `split`; values that are not numbers are skipped."""

    def log(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_boards(run: Path, config: RunConfig, start: int) -> list[Board]:
    """The loggers that the configuration enables. TensorBoard is used if it is installed."""
    boards: list[Board] = []
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is not None:
        boards.append(TensorBoard(run, start))
    if config.train.wandb:
        boards.append(WeightsAndBiases(run, config))
    return boards


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in named_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project at Weights & Biases; in offline mode, files in RUN/wandb for `wandb sync`."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("--wandb", "wandb") from None
        try:
            self._run = wandb.init(
                project=config.train.wandb,
                name=run.name,
                dir=str(run),
                id=_id_of(run),
                resume="allow",
                mode="offline" if config.train.wandb_offline else None,  # None: WANDB_MODE decides
                config=config.to_dict(),
            )
        except wandb.Error as error:  # such as a project name that it refuses, or no key
            raise TrainingError(f"--wandb {config.train.wandb}: {first_line(error)}") from None

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log(named_numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def named_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of metrics, named as in `train/bits_per_token`."""
    numbers = {name: value for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
    return {f"{record['split']}/{name}": value for name, value in numbers.items()}


def _id_of(run: Path) -> str:
    path = run / WANDB_ID
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:16] + "\n")
    return path.read_text(errors="replace").strip()

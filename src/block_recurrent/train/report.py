"""The output of a run: metrics.jsonl, log.txt, TensorBoard and wandb, and a progress line on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from block_recurrent.errors import FileFormatError, TrainingError, printable
from block_recurrent.io.door import first_line, is_count, is_number, is_text, read_bytes
from block_recurrent.train.boards import Board

METRICS = "metrics.jsonl"
LOG = "log.txt"


class _Record(dict[str, Any]):
    """A line of metrics: a value that it lacks is an error of the file."""

    def __missing__(self, key: str) -> Any:
        raise FileFormatError(f"'{METRICS}' has a line without '{key}': {str(dict(self))[:60]}...")


_NUMBERS = ("bits_per_token", "tokens", "tokens_seen", "tokens_per_second", "tokens_read", "seconds")
"""Those of a line that cards and studies compute with."""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics."""
    try:
        lines = read_bytes(run / METRICS).decode().splitlines()
        return [_checked(json.loads(line)) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"'{run / METRICS}' can't be read: {first_line(error)}") from None


def _checked(record: Any) -> _Record:
    check = isinstance(record, dict) and is_count(record.get("step")) and is_text(record.get("split"))
    if not check or not all(is_number(record[key]) and record[key] >= 0 for key in _NUMBERS if key in record):
        raise ValueError(f"{str(record)[:60]} is not a line of metrics")
    return _Record(record)


def cut_back(metrics: Path, step: int, before_validation: bool = False) -> None:
    """Drop the records after a step (or after its update, `before_validation`) and an incomplete last line, so that
    the resumed run can write them again."""
    if not metrics.exists():
        return
    end = 0
    with open(metrics, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged line, and those after it, stay
                record = json.loads(line)
                if (record["step"], record.get("split") != "train") > (step, not before_validation):
                    break
            end += len(line)
    with open(metrics, "rb+") as file:
        file.truncate(end)


class Reporter:
    """Writes logs and metrics. On processes other than the main one (`run` is None) it does nothing."""

    def __init__(self, run: Path | None, steps: int, start: int, log_every: int, boards: Sequence[Board] = ()) -> None:
        self.is_silent = run is None
        self._boards = boards
        self._steps, self._log_every = steps, log_every
        if run is None:
            return
        self._metrics: TextIO = _open(run / METRICS)
        self._log: TextIO = _open(run / LOG)
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("training", total=steps, completed=start)

    def __enter__(self) -> Reporter:
        if not self.is_silent:
            self._progress.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_silent:
            return
        self._progress.stop()
        if error is not None:
            self._write(self._log, f"{_now()} stopped: {type(error).__name__}: {error}")
        for board in self._boards:
            board.close()
        self._metrics.close()
        self._log.close()

    def say(self, text: str) -> None:
        """Write to the log and to the terminal."""
        if not self.is_silent:
            self._write(self._log, f"{_now()} {text}")
            self._console.print(printable(text), markup=False)

    def warn(self, text: str) -> None:
        """`say` with the prefix "warning:"."""
        self.say(f"warning: {text}")

    def status(self, text: str) -> None:
        """Set the text of the progress line until the next step."""
        if not self.is_silent:
            self._progress.update(self._task, description=text)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Write one record to metrics.jsonl, and update the log, the terminal, TensorBoard and wandb as due."""
        if self.is_silent:
            return
        self._write(self._metrics, json.dumps(record))
        step, split = record["step"], record["split"]
        for board in self._boards:
            board.log(record)
        if split == "train":
            speed = f"{record['bits_per_token']:.3f} bits, {record['tokens_per_second']:,.0f} tokens/s"
            self._progress.update(self._task, completed=step, description=speed)
            if step % self._log_every == 0 or step in (1, self._steps):
                self._plain(f"step {step}/{self._steps} {speed}, rate {record['learning_rate']:.3g}")
        else:
            gain = record.get("state_gain")
            state = "" if gain is None else f", the state saves {gain:.4f}"
            self.say(f"step {step}/{self._steps} {split} {record['bits_per_token']:.4f} bits per token{state}")

    def _plain(self, text: str) -> None:
        """Write a line that a terminal does not need, since it shows the progress line."""
        self._write(self._log, f"{_now()} {text}")
        if not self._console.is_terminal:
            self._console.print(text, markup=False)

    @staticmethod
    def _write(file: TextIO, line: str) -> None:
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            raise TrainingError(
                f"'{file.name}' can't be written: {error.strerror or error}; free some space, and rerun "
                "the same command to resume"
            ) from None


def _open(path: Path) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"'{path}' can't be written: {error.strerror or error}") from None


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")

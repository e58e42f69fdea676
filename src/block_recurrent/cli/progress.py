"""A progress bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_SECONDS, BAR_SECONDS = 10.0, 0.1


class ByteProgress:
    """Documents and bytes done, of a total that may be unknown."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total = title, total
        self._done = (0, 0)
        self._bar: Any = None
        self._begin = self._last = time.monotonic()
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(title, total=total, documents=0)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._show(*self._done)
            self._bar.stop()

    def update(self, documents: int, size: int) -> None:
        """Says how much has been done altogether."""
        self._done = (documents, size)
        now = time.monotonic()
        if now - self._last < (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            return
        self._last = now
        self._show(documents, size)

    def _show(self, documents: int, size: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=size, documents=documents)
        else:
            of_total = f" of {self._total / 1e6:,.0f}" if self._total else ""
            rate = size / 1e6 / (time.monotonic() - self._begin)
            print(
                f"{self._title}: {documents:,} documents, {size / 1e6:,.0f}{of_total} MB, {rate:,.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]} documents"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )

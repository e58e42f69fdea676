"""Progress of long tasks: a bar on a terminal, occasional lines elsewhere. On stderr, so that output can be piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from block_recurrent.errors import printable

LINE_SECONDS, BAR_SECONDS = 10.0, 0.1
Progress = Callable[[int, int | None], None]
"""Called with the amount done and the total, if it is known."""


@contextmanager
def shown_progress(what: str, unit: str = "tokens") -> Iterator[Progress]:
    """A function that reports progress."""
    if not sys.stderr.isatty():
        yield _lines(what, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    count: ProgressColumn = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield _not_too_often(lambda done, whole: bar.update(task, completed=done, total=whole), BAR_SECONDS)


def tell(text: str) -> None:
    """Show the current activity on the last line of a terminal; nothing if stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{printable(text)}", end="", file=sys.stderr, flush=True)


@contextmanager
def shown_status(text: str) -> Iterator[None]:
    """Show the activity during work without a countable progress."""
    tell(text)
    try:
        yield
    finally:
        tell("")


def _lines(what: str, unit: str) -> Progress:
    def line(done: int, whole: int | None) -> None:
        of_all = f" of {whole:,}" if whole else ""
        print(f"{what}: {done:,}{of_all} {unit}", file=sys.stderr, flush=True)

    return _not_too_often(line, LINE_SECONDS)


def _not_too_often(show: Progress, seconds: float) -> Progress:
    last = time.monotonic()

    def update(done: int, whole: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            show(done, whole)

    return update

"""What commands give out: tables on the terminal and in Markdown, and files of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from block_recurrent.errors import DataError


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they need to be: the first to the left, numbers to the right."""
    table = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write '{path}': {error.strerror or error}") from None

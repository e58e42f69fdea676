"""Output of commands: tables on the terminal and in Markdown, and files that are written atomically."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from block_recurrent.errors import BlockRecurrentError, FileFormatError, OutputError
from block_recurrent.io.atomic import atomic_file
from block_recurrent.io.door import first_line, read_bytes


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural unless the number is one."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text: the first column aligned left, the others right."""
    table = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(format_table(head, rows))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_file(
    path: Path, content: str | bytes, error: type[BlockRecurrentError] = OutputError, make_folder: bool = False
) -> None:
    """Write a file atomically; `error` is the exception to raise if that fails."""
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Half a character, of a name that is not UTF-8, is written as JSON would escape it.
        raw = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        if path.exists() and not path.is_file():
            path.write_bytes(raw)  # /dev/stdout, a pipe
            return
        with atomic_file(path) as aside:
            aside.write_bytes(raw)
    except OSError as problem:
        raise error(f"'{path}' can't be written: {problem.strerror or problem}") from None


def finite(data: Any) -> Any:
    """The same with non-finite numbers as None: JSON has no other."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write_json(path: Path, data: Any) -> None:
    write_file(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; any problem is a FileFormatError."""
    try:
        values = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"'{path}' can't be read: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"'{path}' does not contain a JSON object")
    return values

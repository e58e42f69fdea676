"""Output that all commands share: `--json`, `--overwrite`, notes, and sizes."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from block_recurrent.errors import INTERRUPTED, ConfigError, DataError, printable
from block_recurrent.io.door import read_bytes
from block_recurrent.io.output import finite, write_file

MOST_THREADS, MOST_MINUTES = 1024, 366 * 24 * 60


def print_notes(notes: Iterable[str]) -> None:
    """Print notes to standard error, separate from the output."""
    for note in notes:
        print(f"brt: note: {printable(note)}", file=sys.stderr)


def stopped() -> int:
    """Print that a command was stopped, and how to resume it; returns its exit code."""
    print("stopped; rerun the same command to resume", file=sys.stderr)
    return INTERRUPTED


def size(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,.0f} bytes"


def add_command(commands: Any, name: str, what: str, example: str, note: str = "") -> argparse.ArgumentParser:
    """A command below another one; its help begins with what it does, and ends with an example."""
    about = f"{what}. {note}" if note else what
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=about, epilog=f"example: {example}", allow_abbrev=False
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json` means the same in every command."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON to FILE; '-' or no FILE: print JSON instead of text",
    )
    add_overwrite(parser)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace output files that exist")


def text_of(args: argparse.Namespace, is_progress: bool = False) -> AbstractContextManager[Any]:
    """Around everything that a command prints as text: with `--json -`, standard output is for JSON only. Progress
    messages then go to standard error, and other text is omitted."""
    if args.json != "-":
        return nullcontext()
    return redirect_stdout(sys.stderr if is_progress else io.StringIO())


def give_json(args: argparse.Namespace, value: Any) -> None:
    """Write JSON as `--json` says, if it was given."""
    text = json.dumps(finite(value), indent=1, default=str) if args.json else ""
    if args.json == "-":
        print(text)
    elif args.json:
        _check_new(Path(args.json), args)  # again: the command itself may have written it, into a folder of results
        write_file(Path(args.json), text + "\n")


def in_snake_case(titles: Any) -> Any:
    """What is printed under titles, with keys for JSON."""
    if isinstance(titles, dict):
        return {re.sub(r"\W+", "_", title).strip("_").lower(): in_snake_case(value) for title, value in titles.items()}
    return [in_snake_case(value) for value in titles] if isinstance(titles, (list, tuple)) else titles


def check_outputs(args: argparse.Namespace, *names: str, beside: str | Path | None = None) -> None:
    """Before the work begins: raise an error if an output file can't be written, or would replace another.

    beside: a further output of the command, a memory or a folder, which is checked elsewhere.
    """
    paths = [Path(value) for name in names if (value := getattr(args, name, None)) and value != "-"]
    outputs = [*paths, Path(beside)] if beside else paths
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise ConfigError(f"two outputs have the same name: {', '.join(map(str, outputs))}")
    for path in paths:
        parent = path.absolute().parent
        if path.is_dir():
            raise DataError(f"'{path}' can't be written: it is a directory")
        _check_new(path, args)
        if not parent.is_dir():
            raise DataError(f"'{path}' can't be written: there is no folder '{path.parent}'")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise DataError(f"'{path}' can't be written: directory '{path.parent}' is not writable")


def _check_new(path: Path, args: argparse.Namespace) -> None:
    if path.is_file() and not args.overwrite:
        raise ConfigError(f"'{path}' exists: give --overwrite to replace it, or another name")


def check_range(args: argparse.Namespace, name: str, least: int, most: int | None = None) -> None:
    """Raise an error if the value of an option is out of range."""
    value = getattr(args, name)
    if value < least or (most is not None and value > most):
        rule = f"at least {least}" if value < least else f"at most {most}"
        raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {rule}")


def check_budget(minutes: float) -> None:
    if not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"--budget is {minutes}: it must be a number of minutes above 0, and at most {MOST_MINUTES}")


def check_results(folder: Path, name: str, keys: set[str], overwrite: bool) -> None:
    """Before the work begins: raise an error if results would replace files that this command has not written.

    The results of an earlier call, whose JSON has these keys, are replaced: they are extended or computed again.
    """
    try:
        found = json.loads(read_bytes(folder / f"{name}.json"))
    except (OSError, ValueError, RecursionError):
        found = None
    if overwrite:
        return
    is_ours = isinstance(found, dict) and keys <= found.keys()
    for suffix in (".json", ".md", ".html", ".png", "-by-position.html", "-by-position.png"):
        path = folder / f"{name}{suffix}"
        if path.is_symlink() or (path.exists() and not is_ours):  # a link may lead to any file
            raise ConfigError(f"'{path}' exists: give --overwrite to replace it, or another --out")

"""`brt read`: read a book once, and keep its memory in a small file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from block_recurrent.errors import DataError

if TYPE_CHECKING:
    from block_recurrent.inference.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("text", nargs="+", help="UTF-8 text files, read one after the other as one document")
    parser.add_argument("--memory", required=True, metavar="FILE", help="the memory file to write")
    parser.add_argument("--from", dest="earlier", metavar="FILE", help="go on from this memory file")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model: the same for every command that reads or writes."""
    parser.add_argument("run", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint's folder (default: last)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    add_weights_argument(parser)


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=("float32", "bfloat16", "int8"),
        default="float32",
        help="precision of the weights: smaller ones decode faster and predict a little worse (default: float32)",
    )
    parser.add_argument("--int8", dest="weights", action="store_const", const="int8", help="the same as --weights int8")


def open_session(args: argparse.Namespace, memory: str | None) -> Session:
    """The session to work with; says on stderr what the run has to say."""
    from block_recurrent.inference.open_session import session_of_run

    session, notes = session_of_run(args.run, args.checkpoint, args.device, args.weights, memory)
    for note in notes:
        print(f"brt: note: {note}", file=sys.stderr)
    return session


def run(args: argparse.Namespace) -> int:
    from block_recurrent.inference.session_file import check_target
    from block_recurrent.inference.text_input import read_text

    check_target(Path(args.memory))
    _check_texts(args.text)
    session = open_session(args, args.earlier)
    began, start = time.perf_counter(), session.position
    for path in args.text:
        for piece in read_text(path):
            session.read(piece)
    seconds, count = time.perf_counter() - began, session.position - start
    session.save(args.memory)
    size = Path(args.memory).stat().st_size
    print(
        f"read {count:,} tokens in {seconds:.1f} s ({count / max(seconds, 1e-9):,.0f} tokens/s), {session.position:,} "
        f"in all; the memory is in '{args.memory}' ({size / 2**20:.1f} MiB)"
    )
    return 0


def _check_texts(paths: list[str]) -> None:
    """A wrong name is found before hours of reading, not after."""
    for path in paths:
        if not Path(path).is_file():
            raise DataError(f"there is no text file '{path}'")
        if Path(path).stat().st_size == 0:
            raise DataError(f"'{path}' is empty: there is nothing to read")

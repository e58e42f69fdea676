"""`brt read`: read a text once, and save its memory to a small file."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from block_recurrent.cli.output import add_json, check_outputs, give_json, print_notes, size, text_of
from block_recurrent.errors import INTERRUPTED, ConfigError, DataError
from block_recurrent.run_config.sections import DTYPES

if TYPE_CHECKING:
    from block_recurrent.inference.session import Session
    from block_recurrent.inference.trail import Trail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "text", nargs="+", metavar="TEXT", help="UTF-8 text files, read in order as one document; - for standard input"
    )
    parser.add_argument("--memory", required=True, metavar="FILE", help="the memory file to write")
    parser.add_argument("--from", dest="earlier", metavar="FILE", help="start from this memory file")
    add_json(parser)
    parser.add_argument(
        "--trail", type=int, default=0, metavar="N", help="keep N checkpoints of the memory while reading (default: 0)"
    )
    parser.add_argument(
        "--trail-every",
        type=int,
        default=65536,
        metavar="N",
        help="minimum number of tokens between checkpoints (default: 65536)",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose a model, shared by all commands that read or generate."""
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or a model name (see 'brt models')")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    add_dtype_argument(parser)
    add_weights_argument(parser)
    add_state_argument(parser)


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="dtype of the computation: auto is bfloat16 on a GPU that has it, else float32; states are always float32",
    )


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", metavar="FILE", help="start documents from this state (made by 'brt train --tune state')"
    )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=("float32", "bfloat16", "int8"),
        default="float32",
        help="precision of the weights: lower precision decodes faster and predicts slightly worse",
    )
    parser.add_argument("--int8", dest="weights", action="store_const", const="int8", help="the same as --weights int8")


def open_session(args: argparse.Namespace, memory: str | None) -> Session:
    """Open the session, and print the notes of the run on stderr."""
    from block_recurrent.inference.open_session import session_of_run

    session, notes = session_of_run(
        args.run, args.checkpoint, args.device, args.weights, memory, args.state, args.dtype
    )
    print_notes(notes)
    return session


def check_memory_target(path: str, source: str | None, overwrite: bool) -> None:
    """Raise an error if a memory can't be written there; only the file given by `--from` is replaced without asking."""
    from block_recurrent.inference.session_file import check_target

    check_target(Path(path))
    if Path(path).exists() and not overwrite and not (source and Path(path).samefile(source)):
        raise ConfigError(f"memory file '{path}' exists: give --overwrite to replace it, or another name")


def run(args: argparse.Namespace) -> int:
    from block_recurrent.inference.session_file import save_session

    if args.trail < 0 or args.trail_every < 1:
        raise ConfigError("--trail must be at least 0, and --trail-every at least 1")
    check_memory_target(args.memory, args.earlier, args.overwrite)
    check_outputs(args, "json", beside=args.memory)
    check_texts(args.text)
    session = open_session(args, args.earlier)
    began, start = time.perf_counter(), session.position
    trail, stopped, problem = _read(session, args)
    seconds, count = time.perf_counter() - began, session.position - start
    save_session(session, Path(args.memory), trail.to_notes())
    file_bytes, rate = Path(args.memory).stat().st_size, count / max(seconds, 1e-9)
    with text_of(args):
        print(
            f"read {count:,} tokens in {seconds:.1f} s ({rate:,.0f} tokens/s), {session.position:,} in total; the "
            f"memory is in '{args.memory}' ({size(file_bytes)})"
        )
    facts = {"tokens": count, "seconds": seconds, "tokens_per_second": rate, "position": session.position}
    give_json(args, facts | {"memory": args.memory, "file_bytes": file_bytes, "stopped_at_byte": stopped})
    if problem is not None:
        raise DataError(f"{problem}; what precedes it was read, and is in '{args.memory}'")
    if stopped is None:
        return 0
    print(f"stopped: to resume, read the text from byte {stopped:,} with --from '{args.memory}'", file=sys.stderr)
    return INTERRUPTED


def _read(session: Session, args: argparse.Namespace) -> tuple[Trail, int | None, DataError | None]:
    """Read the texts; returns the checkpoints and, if Ctrl-C or a text that can't be read further stopped it, the
    number of bytes that have been read, and the error. The session is then between two pieces."""
    from block_recurrent.inference.text_input import read_text
    from block_recurrent.inference.trail import continued, save_checkpoint

    before, problem = bytes_of(session), None
    trail, last = continued(args.earlier, Path(args.memory)), session.position
    try:
        for path in args.text:
            for piece in read_text(path):
                session.read(piece)
                if args.trail and session.position - last >= args.trail_every:
                    trail = trail.add(save_checkpoint(session, Path(args.memory).parent), args.trail)
                    last = session.position
    except KeyboardInterrupt:
        if bytes_of(session) == before:
            raise  # there is nothing to keep, and the file may have an earlier memory
        return trail, bytes_of(session) - before, None
    except DataError as error:
        problem = error
    count = bytes_of(session) - before
    if count == 0:  # standard input, which no check could open
        raise problem or DataError(f"{', '.join(args.text)}: empty, there is nothing to read")
    return trail, count if problem else None, problem


def bytes_of(session: Session) -> int:
    """The length of the text that a session has read and generated, with what it holds back."""
    return len(session.state.held) + session.state.text.length


def check_texts(paths: list[str]) -> None:
    """Finds a wrong name or an invalid byte before hours of reading, not after."""
    from block_recurrent.inference.text_input import check_text

    for path in (path for path in paths if path != "-"):
        check_text(path)


def not_empty(path: str, pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text; none are an error."""
    first = next(pieces, None)
    if first is None:
        raise DataError(f"'{path}' is empty: there is nothing to read")
    return itertools.chain([first], pieces)

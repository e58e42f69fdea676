"""`brt harness`: run tasks of lm-evaluation-harness, with the memory carried through whole documents."""

from __future__ import annotations

import argparse
from pathlib import Path

from block_recurrent.cli.output import add_json, check_outputs, give_json
from block_recurrent.errors import ConfigError, DataError, MissingExtraError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or a model name (see 'brt models')")
    parser.add_argument("--books", metavar="DIR", help="a folder of text files for the task 'books'")
    parser.add_argument("--tasks", default="", metavar="A,B", help="tasks of the harness (default: none)")
    parser.add_argument("--limit", type=int, help="number of documents per task (default: all)")
    parser.add_argument("--batch-size", type=int, default=1, help="texts per batch")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json")
    tasks = [name for name in args.tasks.split(",") if name]
    if not tasks and not args.books:
        raise ConfigError("nothing to do: give --books, a folder of text files, or --tasks, names of tasks")
    if args.books and not Path(args.books).exists():
        raise DataError(f"--books: '{args.books}' does not exist")
    if min(args.batch_size, 1 if args.limit is None else args.limit) < 1:
        raise ConfigError("--batch-size and --limit must be at least 1")
    try:
        from block_recurrent.hub.harness import BlockRecurrentHarness, evaluate
    except ImportError:
        raise MissingExtraError("brt harness", "lm-eval") from None
    lm = BlockRecurrentHarness(args.run, args.checkpoint, batch_size=args.batch_size)
    found = evaluate(lm, args.books, tasks, args.limit)
    args.json = args.json or "-"
    give_json(args, found)
    return 0

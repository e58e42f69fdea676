"""`brt export`: the weights of a run as one safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from block_recurrent.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, such as model.safetensors")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint's folder (default: last)")


def run(args: argparse.Namespace) -> int:
    from block_recurrent.checkpoint import export

    try:
        loaded = export(args.run, Path(args.out), args.checkpoint)
    except OSError as error:
        raise CheckpointError(f"'{args.out}' can't be written: {error.strerror or error}") from None
    for note in loaded.notes:
        print(f"warning: {note}")
    print(f"step {loaded.checkpoint.step} of '{args.run}' is in '{args.out}'")
    return 0

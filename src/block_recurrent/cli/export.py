"""`brt export`: write a run as a Hugging Face folder, or its weights as one safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from block_recurrent.cli.output import add_json, check_outputs, give_json, print_notes, text_of
from block_recurrent.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from block_recurrent.checkpoint import LoadedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or a model name (see 'brt models')")
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="a new folder for AutoModelForCausalLM.from_pretrained (extra 'hf')"
    )
    parser.add_argument("--out", metavar="FILE", help="write only the weights, to one file such as model.safetensors")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if bool(args.folder) == bool(args.out):
        raise ConfigError("give one output: a folder for Hugging Face, or --out FILE for the weights only")
    if args.folder and Path(args.folder).exists():
        raise ConfigError(f"'{args.folder}' exists: choose another folder, or remove it")
    check_outputs(args, "out", "json", beside=args.folder)
    try:
        loaded = _export(args)
    except OSError as error:
        raise CheckpointError(f"'{args.folder or args.out}' can't be written: {error.strerror or error}") from None
    print_notes(loaded.notes)
    out = args.folder or args.out
    with text_of(args):
        print(f"step {loaded.checkpoint.step} of '{args.run}' was written to '{out}'")
    give_json(args, {"run": args.run, "step": loaded.checkpoint.step, "out": out})
    return 0


def _export(args: argparse.Namespace) -> LoadedRun:
    if args.folder:
        from block_recurrent.hub.export import export_folder

        return export_folder(args.run, Path(args.folder), args.checkpoint)
    from block_recurrent.checkpoint import export

    return export(args.run, Path(args.out), args.checkpoint)

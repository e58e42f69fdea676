"""`brt eval`: bits per token, bits per byte and word-level perplexity of runs on whole documents."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.output import add_json, check_outputs, give_json, print_notes
from block_recurrent.cli.read import add_dtype_argument, add_state_argument, add_weights_argument
from block_recurrent.errors import ConfigError

if TYPE_CHECKING:
    from block_recurrent.checkpoint import LoadedRun
    from block_recurrent.evaluate.evaluation import Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, checkpoints, or model names (see 'brt models')"
    )
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="DIR", help="prepared data: one folder, or one per run"
    )
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument(
        "--document", action="append", default=[], metavar="NAME", help="only this document (repeatable)"
    )
    parser.add_argument(
        "--clear-every",
        type=int,
        metavar="TOKENS",
        help="reset the recurrent state every N tokens, but keep the window",
    )
    add_json(parser)
    parser.add_argument("--per-token", metavar="FILE", type=Path, help="write the loss of every token, as .npz or .csv")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="cumulative cross-entropy of all runs: .html or .png")
    parser.add_argument("--words", choices=("auto", "counted", "pg19"), default="auto", help="how words are counted")
    add_dtype_argument(parser)
    add_weights_argument(parser)
    add_state_argument(parser)
    add_scoring_arguments(parser)


def add_scoring_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that change only speed and memory use."""
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    parser.add_argument("--lanes", type=int, default=8, help="documents scored in parallel")
    parser.add_argument("--chunk", type=int, help="tokens per lane and call (default: the segment, or more)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")


def run(args: argparse.Namespace) -> int:
    folders = args.data * len(args.runs) if len(args.data) == 1 else args.data
    if len(folders) != len(args.runs):
        raise ConfigError(f"--data has {len(folders)} folders for {len(args.runs)} runs: give one, or one for each run")
    if args.per_token and len(args.runs) > 1:
        raise ConfigError("--per-token writes the losses of one run: give one run")
    _check_outputs(args)
    from block_recurrent.evaluate.show import describe, vocabulary_row, vocabulary_table

    results: list[dict[str, Any]] = []
    curves, rows = {}, []
    for name, folder in zip(args.runs, folders, strict=True):
        loaded, result = _evaluate(name, folder, args)
        if args.json != "-":
            print((f"{name}: " if len(args.runs) > 1 else "") + describe(result) + "\n")
        kind = "sentencepiece" if loaded.tokenizer.model is not None else "bytes"
        rows.append(vocabulary_row(name, kind, loaded.tokenizer.size, result))
        curves[name] = result.cumulative
        facts = {"run": name, "step": loaded.checkpoint.step, "data": folder, "clear_every": args.clear_every}
        facts |= {"weights": args.weights, "dtype": args.dtype}
        results.append({**facts, "tokenizer": kind, "vocabulary_size": loaded.tokenizer.size, **result.to_dict()})
    if len(rows) > 1 and args.json != "-":
        print(vocabulary_table(rows))
    give_json(args, results[0] if len(results) == 1 else {"table": rows, "runs": results})
    if args.plot:
        from block_recurrent.analysis.plots import cumulative_chart, write_chart

        write_chart(args.plot, cumulative_chart(curves))
    return 0


def load(name: str, args: argparse.Namespace, checkpoint: str | None = None) -> LoadedRun:
    """Load a run onto the requested device, and print its notes."""
    from block_recurrent.checkpoint import load_run, load_state
    from block_recurrent.runtime import pick_device

    loaded = load_run(name, checkpoint or args.checkpoint, pick_device(args.device))
    print_notes(loaded.notes)
    if getattr(args, "state", None):
        load_state(loaded.model, args.state)
    return loaded


def _evaluate(name: str, folder: str, args: argparse.Namespace) -> tuple[LoadedRun, Evaluation]:
    from block_recurrent.data import Corpus
    from block_recurrent.evaluate.evaluation import EvalSettings, check_tokenizer, evaluate_split
    from block_recurrent.evaluate.state_edits import clear_every
    from block_recurrent.inference.engine import Engine
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.runtime import pick_dtype

    corpus = Corpus(folder)
    loaded = load(name, args)
    check_tokenizer(loaded.tokenizer.sha256, corpus, name)
    edit = None if args.clear_every is None else clear_every(loaded.model, args.clear_every)
    settings = EvalSettings(args.lanes, args.chunk, args.per_token, args.words, tuple(args.document), edit)
    engine = Engine(loaded.model, args.weights, pick_dtype(args.dtype, loaded.model.embedding.weight.device))
    with shown_progress(f"scoring '{args.split}'") as progress:
        return loaded, evaluate_split(engine, corpus, args.split, settings, progress)


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise errors before the work begins, rather than after it."""
    if args.per_token:
        from block_recurrent.evaluate.token_losses import check_path

        check_path(args.per_token)
    if args.plot:
        from block_recurrent.analysis.plots import check_plot_path

        check_plot_path(args.plot)
    check_outputs(args, "json", "plot", "per_token")

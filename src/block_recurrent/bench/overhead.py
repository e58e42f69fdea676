"""`brt bench overhead`: a step of `brt train`, compared with a bare loop of forward, backward and update."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from block_recurrent.bench.harness import paired_rates
from block_recurrent.presets import SIZES

SUMMARY = "a step of 'brt train', compared with a bare loop on the same batch shape"
EXAMPLE = "brt bench overhead --data build/books --size tiny"
NOTE = (
    "Steps of both kinds in turns, in one process. train: data, metrics, gate statistics, checks and all else that "
    "'brt train' does at every step. bare: forward, backward and update on one batch of random tokens. ratio: "
    "train over bare, the median over pairs of neighbors."
)
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="DIR", help="a prepared folder")
    parser.add_argument(
        "--systems", default="rec-fixed-skip", metavar="A,B", help="systems to measure (default: rec-fixed-skip)"
    )
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: tiny)")
    parser.add_argument("--repeats", type=int, default=40, help="number of pairs of steps (default: 40)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per system."""
    return [_row(system, args) for system in args.systems.split(",")]


def _row(system: str, args: argparse.Namespace) -> dict[str, Any]:
    from block_recurrent.bench.steptime import TrainingStep
    from block_recurrent.data import Corpus
    from block_recurrent.run_config import resolve
    from block_recurrent.runtime import start
    from block_recurrent.train.loop import Trainer
    from block_recurrent.train.report import Reporter

    corpus = Corpus(args.data)
    config = resolve({"system": system, "size": args.size, "data": {"path": args.data}}, corpus.vocab_size)
    bare = TrainingStep(config.model, config.train.lanes, config.optimizer)
    tokens = config.train.lanes * config.model.segment
    with start() as runtime, tempfile.TemporaryDirectory(prefix="brt-bench-") as folder:
        trainer = Trainer(config, runtime)
        with Reporter(Path(folder), args.repeats, 0, log_every=10**9) as reporter, trainer.stream:
            train = ("train", lambda: trainer.one_step(reporter, False))
            return {"system": system, "size": args.size} | paired_rates(
                train, ("bare", bare), tokens, args.repeats, WARM_UP
            )

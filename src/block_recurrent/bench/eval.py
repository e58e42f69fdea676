"""`brt bench eval`: scoring as in `brt eval`, compared with training at the same size and lanes."""

from __future__ import annotations

import argparse
from typing import Any

from block_recurrent.bench.harness import paired_rates
from block_recurrent.presets import SIZES, preset
from block_recurrent.run_config import default_optimizer

SUMMARY = "scoring as in 'brt eval', compared with training at the same size and lanes"
EXAMPLE = "brt bench eval --size tiny --systems rec-fixed-skip,slide-plus"
NOTE = (
    "Alternating in one process, on random tokens, with equal numbers of segments, after a warm-up. scoring: whole "
    "documents, one per lane. training: forward, backward and the update of the size's optimizer, with the "
    "preset's dropout and the memory carried. tokens/s: the median. ratio: scoring over training, the "
    "median over pairs of neighbors."
)
SEGMENTS = 4  # of a turn, in each lane


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systems", default="rec-fixed-skip", metavar="A,B", help="systems to measure (default: rec-fixed-skip)"
    )
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: tiny)")
    parser.add_argument("--vocab-size", type=int, default=257, help="vocabulary size (default: 257)")
    parser.add_argument("--lanes", type=int, default=8, help="documents in parallel (default: 8)")
    parser.add_argument("--repeats", type=int, default=5, help="number of pairs (default: 5)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per system."""
    return [_row(system, args) for system in args.systems.split(",")]


def _row(system: str, args: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    from block_recurrent.bench.steptime import TrainingStep
    from block_recurrent.evaluate.scoring import score
    from block_recurrent.model.language_model import BlockRecurrentLM

    config = preset(system, args.size, args.vocab_size)
    step = TrainingStep(config, args.lanes, default_optimizer(args.size))
    model = BlockRecurrentLM(config).eval()
    length = SEGMENTS * config.segment
    documents = list(np.random.default_rng(0).integers(0, config.eos_token_id, (args.lanes, length)))

    def training() -> None:
        for _ in range(SEGMENTS):
            step()

    def scoring() -> None:
        for _ in score(model, documents, args.lanes):
            pass

    found = paired_rates(("training", training), ("scoring", scoring), args.lanes * length, args.repeats, warm_up=1)
    return {"system": system, "size": args.size, "lanes": args.lanes, **found}

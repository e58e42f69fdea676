"""`brt recall`: train a system on planted names, and measure recall by distance."""

from __future__ import annotations

import argparse
from pathlib import Path

from block_recurrent.cli.output import (
    MOST_THREADS,
    add_json,
    check_outputs,
    check_range,
    check_results,
    give_json,
    stopped,
    text_of,
)
from block_recurrent.errors import OutputError
from block_recurrent.io.output import write_json
from block_recurrent.presets import SIZES, SYSTEMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="rec-fixed-skip", help=f"the system to train: {', '.join(SYSTEMS)}")
    parser.add_argument("--against", default="slide-plus", help="a system to compare it with, or 'none'")
    parser.add_argument("--size", default="micro", help=f"model size: {', '.join(SIZES)}")
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=Path, help="output folder for runs, documents and plots"
    )
    parser.add_argument("--names", type=int, default=16, help="number of different names (with 16, chance is 4 bits)")
    parser.add_argument("--distance", type=int, default=2048, help="maximum distance, in tokens")
    parser.add_argument("--documents", type=int, default=64, help="documents to measure on")
    parser.add_argument("--steps", type=int, default=2000, help="maximum number of updates")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--gate-rate", type=float, default=10.0, help="factor on the learning rate of gate biases")
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and documents")
    parser.add_argument("--threads", type=int, default=1, help="processor threads; micro models do not benefit from 2")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    for name, least in (("steps", 1), ("documents", 1), ("seed", 0)):
        check_range(args, name, least)
    check_range(args, "threads", 1, MOST_THREADS)
    check_outputs(args, "json", beside=args.out)
    check_results(args.out, "recall", {"names", "systems", "training"}, args.overwrite)
    import torch

    from block_recurrent.analysis.plots import write_charts
    from block_recurrent.studies.curriculum import RecallTraining, cooldown_of
    from block_recurrent.studies.recall import RecallSettings, recall_study
    from block_recurrent.studies.recall_report import describe_recall, recall_chart

    torch.set_num_threads(args.threads)
    training = RecallTraining(
        steps=args.steps,
        cooldown=cooldown_of(args.steps, RecallTraining.cooldown),
        learning_rate=args.lr,
        gate_rate=args.gate_rate,
        longest=args.distance,
        seed=args.seed,
    )
    settings = RecallSettings(
        system=args.system,
        against=None if args.against == "none" else args.against,
        size=args.size,
        names=args.names,
        documents=args.documents,
        longest_asked=args.distance,
        training=training,
    )
    try:
        found = recall_study(settings, args.out)
    except OSError as error:
        raise OutputError(f"can't write to '{args.out}': {error.strerror or error}") from None
    if found is None:
        return stopped()
    write_json(args.out / "recall.json", found)
    written = ["recall.json", *write_charts(args.out / "recall", recall_chart(found))]
    with text_of(args):
        print(describe_recall(found))
        print(f"wrote {', '.join(written)} in {args.out}, along with runs and documents for 'brt compare'")
    give_json(args, found)
    return 0

"""`brt presets`: list the systems and sizes of the paper, with their costs."""

from __future__ import annotations

import argparse
import dataclasses

from block_recurrent.accounting import cost_of
from block_recurrent.cli.output import add_json, check_outputs, give_json, size
from block_recurrent.io.output import print_table
from block_recurrent.presets import DEFAULT_VOCAB_SIZE, SIZES, SYSTEMS, preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help=f"only this system: {', '.join(SYSTEMS)}")
    parser.add_argument("--size", help=f"only this size: {', '.join(SIZES)}")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="vocabulary size")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json")
    rows = []
    for system in [args.system] if args.system else SYSTEMS:
        for dims in [args.size] if args.size else SIZES:
            cost = cost_of(preset(system, dims, vocab_size=args.vocab_size))
            rows.append({"system": system, "size": dims, **dataclasses.asdict(cost)})
    give_json(args, rows)
    if args.json == "-":
        return 0
    head = ["system", "size", "parameters", "non-embedding", "FLOPs/token", "memory/lane"]
    keys = ("parameters", "non_embedding_parameters", "flops_per_token")
    print_table(
        head,
        ([row["system"], row["size"], *(_short(row[key]) for key in keys), size(row["memory_bytes"])] for row in rows),
    )
    print(f"\nvocabulary {args.vocab_size}; FLOPs per training step, including logits; memory in float32")
    return 0


def _short(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.0f}"

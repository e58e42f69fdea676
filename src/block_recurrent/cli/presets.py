"""`brt presets`: the systems and sizes of the paper, and what each costs."""

from __future__ import annotations

import argparse
import dataclasses
import json

from block_recurrent.accounting import cost_of
from block_recurrent.presets import DEFAULT_VOCAB_SIZE, SIZES, SYSTEMS, preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help=f"only this system: {', '.join(SYSTEMS)}")
    parser.add_argument("--size", help=f"only this size: {', '.join(SIZES)}")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="V (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, a list of objects")


def run(args: argparse.Namespace) -> int:
    rows = []
    for system in [args.system] if args.system else SYSTEMS:
        for size in [args.size] if args.size else SIZES:
            cost = cost_of(preset(system, size, vocab_size=args.vocab_size))
            rows.append({"system": system, "size": size, **dataclasses.asdict(cost)})
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'system':22} {'size':6} {'parameters':>11} {'non-embedding':>14} {'FLOPs/token':>12} {'memory/lane':>12}")
    for row in rows:
        print(
            f"{row['system']:22} {row['size']:6} {_short(row['parameters']):>11} "
            f"{_short(row['non_embedding_parameters']):>14} {_short(row['flops_per_token']):>12} "
            f"{row['memory_bytes'] / 2**20:>8.2f} MiB"
        )
    print(f"\nvocabulary {args.vocab_size}; FLOPs of a training step, logits included; memory in float32")
    return 0


def _short(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.0f}"

"""`brt bench versions`: a training step of this version, compared with that of another one."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from block_recurrent.bench.harness import chosen
from block_recurrent.errors import ConfigError
from block_recurrent.io.progress import tell
from block_recurrent.presets import SIZES, SYSTEMS

SUMMARY = "a training step of this version, compared with that of another version"
EXAMPLE = "brt bench versions build/0.1.0 --size tiny --systems slide-plus,rec-fixed-skip"
NOTE = (
    "Forward and backward on random tokens with the memory carried, without dropout and without an update (versions "
    "have different default optimizers), each version in a separate process, in turns. seconds: the best turn; "
    "relative: this version over the other, best over best; median: the median over pairs of neighbors."
)
WARM_UP = 2
STEP = """
import sys, time
import torch
from block_recurrent.allocator import keep_freed_memory
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.presets import SIZES, preset
system, size, lanes = sys.argv[1], sys.argv[2], int(sys.argv[3])
keep_freed_memory()
torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[4]))
config = preset(system, size, vocab_size=32000, dropout=0.0, attention_dropout=0.0)
model = BlockRecurrentLM(config).train()
tokens, memory = torch.randint(0, 32000, (lanes, config.segment + 1)), None
print(config.segment, flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:], memory)
    (loss.sum / loss.count).backward()
    memory = loss.memory.detach()
    seconds = time.perf_counter() - began
    model.zero_grad()
    print(seconds, flush=True)
"""
"""Only names that all versions have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "other", type=Path, metavar="DIR", help="folder of the other version, made by pip install --target DIR"
    )
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: tiny)")
    parser.add_argument(
        "--systems",
        default="slide-plus,rec-fixed-skip",
        metavar="A,B",
        help="systems to measure (default: slide-plus,rec-fixed-skip)",
    )
    parser.add_argument("--lanes", type=int, default=1, help="lanes of a step (default: 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: all cores)")
    parser.add_argument("--repeats", type=int, default=20, help="number of pairs of steps (default: 20)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per system."""
    if not (args.other / "block_recurrent" / "__init__.py").is_file():
        raise ConfigError(f"'{args.other}' has no package 'block_recurrent': see 'brt bench versions --help'")
    chosen(args.size, SIZES, "size")
    if min(args.lanes, args.threads, args.repeats) < 1:
        raise ConfigError("--lanes, --threads and --repeats must be at least 1")
    return [_row(system, args) for system in chosen(args.systems, SYSTEMS, "system")]


def _row(system: str, args: argparse.Namespace) -> dict[str, Any]:
    own = Path(__file__).parents[2]
    shape = [system, args.size, str(args.lanes), str(args.threads)]
    with _steps(own, shape) as ours, _steps(args.other, shape) as theirs:
        pairs = []
        for number in range(args.repeats + WARM_UP):
            tell(f"{system}: pair {number + 1} of {args.repeats + WARM_UP}")
            # Neither version always goes first.
            pairs.append((next(ours), next(theirs)) if number % 2 else (next(theirs), next(ours))[::-1])
    tell("")
    pairs = pairs[WARM_UP:]
    best, other = (min(side) for side in zip(*pairs, strict=True))
    return {
        "system": system,
        "size": args.size,
        "lanes": args.lanes,
        "threads": args.threads,
        "seconds": round(best, 4),
        "other": round(other, 4),
        "relative": round(best / other, 4),
        "median": round(statistics.median(a / b for a, b in pairs), 4),
        "pairs": args.repeats,
    }


@contextlib.contextmanager
def _steps(installed: Path, shape: list[str]) -> Iterator[Iterator[float]]:
    """The seconds of each step of a version; a step runs when the next number is requested."""
    environment = os.environ | {"PYTHONPATH": str(installed.absolute())}
    command, pipe = [sys.executable, "-c", STEP, *shape], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        asks, answers, errors = process.stdin, process.stdout, process.stderr
        assert asks is not None
        assert answers is not None
        assert errors is not None

        def seconds() -> Iterator[float]:
            while True:
                asks.write("\n")
                asks.flush()
                yield float(answers.readline())

        if not answers.readline():
            reason = errors.read().strip().rpartition("\n")[2]
            raise ConfigError(f"the version in '{installed}' cannot run this step: {reason}")
        try:
            yield seconds()
        finally:
            process.kill()

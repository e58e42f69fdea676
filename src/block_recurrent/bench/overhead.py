"""`brt bench overhead`: a step of `brt train` beside a bare loop of forward, backward and update."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.bench.harness import seconds_of
from block_recurrent.presets import SIZES

if TYPE_CHECKING:
    from block_recurrent.data import Corpus
    from block_recurrent.run_config import RunConfig

SUMMARY = "a step of 'brt train' beside a bare loop on the same batch shape"
EXAMPLE = "brt bench overhead --data build/books --size tiny"
NOTE = (
    "Steps of both kinds in turns, in one process. train: data, metrics, gate statistics, checks and all else that "
    "'brt train' does at every step. bare: forward, backward and update on one batch that stays. ratio: the median "
    "over pairs of neighbours, train over bare."
)
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="DIR", help="a prepared folder")
    parser.add_argument("--systems", default="rec-fixed-skip", metavar="A,B", help="which systems (rec-fixed-skip)")
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (tiny)")
    parser.add_argument("--repeats", type=int, default=40, help="pairs of steps (40)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per system."""
    return [_row(system, args) for system in args.systems.split(",")]


def _row(system: str, args: argparse.Namespace) -> dict[str, Any]:
    from block_recurrent.data import Corpus
    from block_recurrent.run_config import resolve
    from block_recurrent.runtime import start
    from block_recurrent.train.loop import Trainer
    from block_recurrent.train.report import Reporter

    corpus = Corpus(args.data)
    config = resolve({"system": system, "size": args.size, "data": {"path": args.data}}, corpus.vocab_size)
    with start() as runtime, tempfile.TemporaryDirectory(prefix="brt-bench-") as folder:
        trainer, bare = Trainer(config, corpus, runtime), _bare_step(config, corpus)
        with Reporter(Path(folder), args.repeats, 0, log_every=10**9) as reporter, trainer.stream:
            pairs = [
                (seconds_of(lambda: trainer.one_step(reporter, False)), seconds_of(bare))
                for _ in range(args.repeats + WARM_UP)
            ][WARM_UP:]
    tokens = config.train.lanes * config.model.segment
    return {
        "system": system,
        "size": args.size,
        "train tokens/s": round(tokens / statistics.median(ours for ours, _ in pairs), 1),
        "bare tokens/s": round(tokens / statistics.median(theirs for _, theirs in pairs), 1),
        "ratio": round(statistics.median(ours / theirs for ours, theirs in pairs), 4),
        "pairs": len(pairs),
    }


def _bare_step(config: RunConfig, corpus: Corpus) -> Callable[[], None]:
    """Forward, backward and update on one batch, again and again."""
    import torch

    from block_recurrent.data import LaneStream
    from block_recurrent.model.language_model import BlockRecurrentLM
    from block_recurrent.model.memory import DocumentMemory
    from block_recurrent.train.optimizer import make_optimizer

    model = BlockRecurrentLM(config.model).train()
    optimizer = make_optimizer(model, config.optimizer)
    with LaneStream(corpus, "train", config.train.lanes, config.model.segment) as stream:
        step = next(stream)
    tokens, targets, mask = (torch.from_numpy(x) for x in (step.tokens, step.targets, step.mask))
    starts = torch.zeros(config.train.lanes, dtype=torch.bool)
    memory = DocumentMemory.empty(config.model, config.train.lanes)

    def run() -> None:
        nonlocal memory
        loss = model.loss(tokens, targets, memory, starts, mask)
        memory = loss.memory.detach()
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run

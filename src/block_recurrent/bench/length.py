"""`brt bench length`: cost per token as documents and segments grow."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.bench.harness import best_seconds, chosen, peak_bytes_of, resident_bytes
from block_recurrent.io.progress import tell
from block_recurrent.presets import SIZES, preset

if TYPE_CHECKING:
    from block_recurrent.model.memory import DocumentMemory

SUMMARY = "cost per token and memory, as documents and segments grow"
EXAMPLE = "brt bench length --size tiny --tokens 200000"
NOTE = (
    "scoring: one document is read in order, and its memory, a value of fixed size, is saved at some positions; then a "
    "segment is scored from each of them, in turns, best of the rounds. resident_bytes: memory of the process "
    "at that position. training: forward and backward of one segment, best of the repeats; resident_bytes is the "
    "peak, in a separate process."
)
ROUNDS = 40
PARTS = ("scoring", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)} (default: small)")
    parser.add_argument("--system", default="rec-fixed-skip", help="system to measure (default: rec-fixed-skip)")
    parser.add_argument(
        "--tokens", type=int, default=1_000_000, help="length of the scored document (default: 1000000)"
    )
    parser.add_argument("--segment", type=int, default=32768, help="longest training segment (default: 32768)")
    parser.add_argument("--vocab-size", type=int, default=1001, help="vocabulary size (default: 1001)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of training; the best counts (default: 3)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of scoring by position, then rows of training by segment length."""
    parts = chosen(args.parts, PARTS, "part")
    rows = list(_scoring(args)) if "scoring" in parts else []
    segment = preset(args.system, args.size).segment
    while "training" in parts and segment <= args.segment:
        for checkpointing in (False, True):
            seconds, peak = _training(args, segment, checkpointing)
            rows.append(
                {
                    "what": "training, activation checkpointing" if checkpointing else "training",
                    "tokens": segment,
                    "tokens_per_second": round(segment / seconds, 1),
                    "resident_bytes": peak,
                }
            )
        segment *= 2
    return rows


def _scoring(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    from block_recurrent.model.language_model import BlockRecurrentLM
    from block_recurrent.model.memory import DocumentMemory

    torch.manual_seed(0)
    config = preset(args.system, args.size, vocab_size=args.vocab_size)
    model = BlockRecurrentLM(config).eval()
    positions = [10_000 * 10**power // part for power in range(8) for part in (10, 5, 2)]
    positions = [p for p in positions if 10_000 <= p < args.tokens] + [args.tokens]
    tokens = torch.randint(0, config.vocab_size, (1, config.segment + 1))
    memory, read = None, 0
    resident: list[int] = []

    def score(memory: DocumentMemory | None) -> DocumentMemory:
        return model.loss(tokens[:, :-1], tokens[:, 1:], memory).memory

    # Saved to disk, so that memory use is that of reading alone.
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        while len(resident) < len(positions):
            memory, read = score(memory), read + config.segment
            if read >= positions[len(resident)]:
                memory.save(Path(folder, f"{len(resident)}.memory"))
                resident.append(resident_bytes())
            tell(f"{read:,} of {args.tokens:,} tokens read")
        memories = [DocumentMemory.load(Path(folder, f"{number}.memory")) for number in range(len(positions))]
        memories = [score(memory) for memory in memories]  # now they belong to the model, and are not checked again
        works = {str(at): partial(score, memory) for at, memory in zip(positions, memories, strict=True)}
        best = best_seconds(works, ROUNDS)
    for position, bytes_there in zip(positions, resident, strict=True):
        rate = round(config.segment / best[str(position)], 1)
        yield {"what": "scoring", "tokens": position, "tokens_per_second": rate, "resident_bytes": bytes_there}


def _training(args: argparse.Namespace, segment: int, checkpointing: bool) -> tuple[float, int]:
    arguments = (args.system, args.size, args.vocab_size, segment, checkpointing)
    best = best_seconds({"step": _segment_step(*arguments)}, args.repeats + 1)["step"]
    return best, peak_bytes_of(_one_segment, *arguments)


def _one_segment(*arguments: Any) -> None:
    _segment_step(*arguments)()


def _segment_step(system: str, size: str, vocab_size: int, segment: int, checkpointing: bool) -> Any:
    from block_recurrent.bench.steptime import TrainingStep
    from block_recurrent.run_config import TrainConfig
    from block_recurrent.train.parallel import prepare_layers

    config = preset(system, size, vocab_size=vocab_size, segment=segment, dropout=0.0, attention_dropout=0.0)
    step = TrainingStep(config, lanes=1)
    prepare_layers(step.model, TrainConfig(checkpoint_activations=checkpointing))
    return step

"""Tokens per second of `brt eval` and of training at the same size and lanes, in turns, in one run. Numbers to read.

python tests/evaluate/measure_speed.py [--size tiny] [--lanes 8] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.evaluate.scoring import score
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import OptimizerConfig
from block_recurrent.train.optimizer import make_optimizer


def training_rate(model: BlockRecurrentLM, optimizer: torch.optim.Optimizer, lanes: int, steps: int) -> float:
    """Forward, backward and update on whole segments, the memory carried."""
    model.train()
    shape = (lanes, model.config.segment)
    tokens = torch.randint(model.config.vocab_size - 1, (steps + 1, *shape))
    memory = DocumentMemory.empty(model.config, lanes)
    began = time.perf_counter()
    for step in range(steps):
        loss = model.loss(tokens[step], tokens[step + 1], memory)
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        memory = loss.memory.detach()
    return steps * lanes * model.config.segment / (time.perf_counter() - began)


def scoring_rate(model: BlockRecurrentLM, lanes: int, steps: int) -> float:
    """As `brt eval` does it: documents as long as `steps` segments, one per lane."""
    model.eval()
    length = steps * model.config.segment
    documents = list(np.random.default_rng(0).integers(0, model.config.vocab_size - 1, (lanes, length)))
    began = time.perf_counter()
    scored = sum(len(piece.nats) for piece in score(model, documents, lanes))
    assert scored == lanes * length
    return scored / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", default="rec-fixed-skip")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--vocab-size", type=int, default=257)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = BlockRecurrentLM(preset(args.system, args.size, args.vocab_size))
    optimizer = make_optimizer(model, OptimizerConfig())
    rates: list[tuple[float, float]] = []
    for number in range(args.rounds + 1):
        pair = (training_rate(model, optimizer, args.lanes, args.steps), scoring_rate(model, args.lanes, args.steps))
        if number:  # the first is a warm-up
            rates.append(pair)
            print(f"training {pair[0]:,.0f} tokens/s, scoring {pair[1]:,.0f} tokens/s: {pair[1] / pair[0]:.2f} times")
    print(f"median ratio: {statistics.median(b / a for a, b in rates):.2f}")


if __name__ == "__main__":
    main()

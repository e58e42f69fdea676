"""The trainer costs little more than a bare loop of forward, backward and update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from block_recurrent import BlockRecurrentLM
from block_recurrent.data import Corpus, LaneStream
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig, resolve
from block_recurrent.runtime import Runtime
from block_recurrent.train.loop import Trainer
from block_recurrent.train.optimizer import Adafactor
from block_recurrent.train.report import Reporter


def bare_step(config: RunConfig, corpus: Corpus) -> Callable[[], None]:
    """Forward, backward and update on one batch, again and again."""
    model = BlockRecurrentLM(config.model).train()
    optimizer = Adafactor(model.parameters(), lr=0.01)
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


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("system", ["rec-fixed-skip", "rec-lstm-dual"])
def test_within_ten_percent_of_a_bare_loop(system: str, corpus: Path, tmp_path: Path) -> None:
    """Steps of either kind in turn, in one process, so that what else the machine does hits both."""
    config = resolve({"system": system, "size": "tiny", "data": {"path": str(corpus)}}, 257)
    opened = Corpus(corpus)
    trainer = Trainer(config, opened, Runtime(torch.device("cpu"), torch.float32))
    bare = bare_step(config, opened)
    with Reporter(tmp_path, 1000, 0, 10) as reporter, trainer.stream:
        pairs = [(seconds_of(lambda: trainer.one_step(reporter, False)), seconds_of(bare)) for _ in range(45)][5:]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"{system}: a step takes {ratio:.3f} times a step of the bare loop")
    assert ratio < 1.1

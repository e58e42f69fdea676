"""Any calls of an engine, on any lanes, equal one call of the model: read, decoded and scored in any pieces."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.inference import Engine
from block_recurrent.model.memory import DocumentMemory

VOCAB, LANES, LENGTH = 23, 4, 60
SIZES = {"d_model": 43, "head_dim": 13, "mlp_dim": 61, "window": 9, "segment": 18}  # that fill no vector
LENGTHS = (1, 1, 2, 3, 4, 5, 8, 9, 10, 17, 18, 27, 40)  # around the window, and what is decoded instead


class History:
    """Lanes at different positions of their texts; every call takes some of them further."""

    def __init__(self, model: BlockRecurrentLM, seed: int) -> None:
        self.rng, self.engine = random.Random(seed), Engine(model)
        self.text = torch.randint(VOCAB, (LANES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.wanted, self.wanted_memory = model(self.text[:, :-1])
        self.memories, self.read = [self.engine.empty() for _ in range(LANES)], [0] * LANES

    def lengths(self, lanes: list[int]) -> list[int]:
        return [min(self.rng.choice(LENGTHS), LENGTH - self.read[lane]) for lane in lanes]

    def rows(self, lanes: list[int], lengths: list[int], offset: int = 0) -> list[Tensor]:
        begins = [self.read[lane] + offset for lane in lanes]
        return [self.text[lane, a : a + n] for lane, a, n in zip(lanes, begins, lengths, strict=True)]

    def step(self) -> None:
        open_lanes = [lane for lane in range(LANES) if self.read[lane] < LENGTH]
        lanes = self.rng.sample(open_lanes, self.rng.randint(1, len(open_lanes)))
        memory = DocumentMemory.cat([self.memories[lane] for lane in lanes])
        call = self.rng.choice([self.prefill_rows, self.prefill_tensor, self.decode, self.decode_many, self.score])
        logits, memories, lengths = call(lanes, memory)
        for index, (lane, length) in enumerate(zip(lanes, lengths, strict=True)):
            self.read[lane] += length
            self.memories[lane] = memories[index]
            if logits is not None:
                wanted = self.wanted[lane, self.read[lane] - 1]
                torch.testing.assert_close(logits[index], wanted, atol=1e-4, rtol=1e-4)

    def prefill_rows(self, lanes: list[int], memory: DocumentMemory) -> Any:
        lengths = self.lengths(lanes)
        logits, memory = self.engine.prefill(self.rows(lanes, lengths), memory)
        return logits, apart(memory), lengths

    def prefill_tensor(self, lanes: list[int], memory: DocumentMemory) -> Any:
        lengths = self.lengths(lanes)
        tokens = torch.zeros(len(lanes), max(lengths) + self.rng.choice([0, 3]), dtype=torch.int64)
        for row, real in zip(tokens, self.rows(lanes, lengths), strict=True):
            row[: len(real)] = real
        logits, memory = self.engine.prefill(tokens, memory, torch.tensor(lengths))
        return logits, apart(memory), lengths

    def decode(self, lanes: list[int], memory: DocumentMemory) -> Any:
        ones = [1] * len(lanes)
        logits, memory = self.engine.decode(torch.cat(self.rows(lanes, ones)), memory)
        return logits, apart(memory), ones

    def decode_many(self, lanes: list[int], _: DocumentMemory) -> Any:
        ones = [1] * len(lanes)
        tokens = torch.cat(self.rows(lanes, ones)).tolist()
        logits, memories = self.engine.decode_many(tokens, [self.memories[lane] for lane in lanes])
        return logits, memories, ones

    def score(self, lanes: list[int], memory: DocumentMemory) -> Any:
        lengths = self.lengths(lanes)
        rows, targets = self.rows(lanes, lengths), self.rows(lanes, lengths, offset=1)
        nats, memory = self.engine.score(rows, targets, memory)
        for lane, row, own in zip(lanes, targets, nats, strict=True):
            wanted = self.wanted[lane, self.read[lane] : self.read[lane] + len(row)].log_softmax(-1)
            np.testing.assert_allclose(own, -wanted.gather(1, row[:, None])[:, 0], atol=1e-4)
        return None, apart(memory), lengths


def apart(memory: DocumentMemory) -> list[DocumentMemory]:
    return [memory.select([lane]) for lane in range(memory.lanes)]


@pytest.mark.parametrize("seed", [0, 1])
def test_any_history_of_calls_equals_the_model(system: str, seed: int) -> None:
    # All of a kNN memory is retrieved, so that nothing hangs on which of two near keys is nearer.
    config = preset(system, "micro", vocab_size=VOCAB, memory_size=64, memory_neighbors=64)
    config = config.replace(**SIZES) if seed else config
    torch.manual_seed(seed)
    model = BlockRecurrentLM(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    history = History(model, seed)
    while min(history.read) < LENGTH:
        history.step()
    assert DocumentMemory.cat(history.memories).difference(history.wanted_memory) < 1e-4

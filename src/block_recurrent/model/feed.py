"""Giving tokens to the model: many at once when reading, one per lane when writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

TOKENS_AT_ONCE = 2048
"""Tokens of one call when reading, or one segment if that is more: enough to be fast, however short the segment."""


class Fed(NamedTuple):
    """The memory after the tokens, and for each lane the nats of its targets, where there are some."""

    memory: DocumentMemory
    nats: list[float]


@contextmanager
def evaluating(model: BlockRecurrentLM) -> Iterator[None]:
    """Without gradients and without dropout, whatever mode the model is in; afterwards it is in that mode again.

    In inference mode: for a single token, what torch notes down for autograd takes up to a tenth of the time.
    """
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_training:
            model.train()


def next_logits(
    model: BlockRecurrentLM, memory: DocumentMemory, tokens: Sequence[int]
) -> tuple[Tensor, DocumentMemory]:
    """One token per lane -> logits (B, V) of the next, and the memory after it."""
    with evaluating(model):
        logits, memory = model(torch.tensor(tokens, device=memory.device)[:, None], memory)
    return logits[:, -1], memory


def feed(
    model: BlockRecurrentLM,
    memory: DocumentMemory,
    rows: Sequence[ArrayLike],
    targets: Sequence[ArrayLike] | None = None,
) -> Fed:
    """Read a row of tokens in each lane, of different lengths perhaps. targets: as many, what to predict at each."""
    arrays = [np.asarray(row, np.int64) for row in rows]
    wanted = None if targets is None else [np.asarray(row, np.int64) for row in targets]
    nats = [0.0] * len(arrays)
    with evaluating(model):
        for start, end in _cuts(model.config, memory, max(map(len, arrays))):
            piece, lengths = _padded(arrays, start, end, memory.device)
            if wanted is None:
                _, memory = model.hidden(piece, memory, lengths=lengths)
                continue
            next_tokens, _ = _padded(wanted, start, end, memory.device)
            loss = model.loss(piece, next_tokens, memory, lengths=lengths)
            memory = loss.memory
            for lane, row in enumerate(arrays):
                real = max(min(end, len(row)) - start, 0)
                nats[lane] += loss.per_token[lane, :real].double().sum().item()
    return Fed(memory, nats)


def _cuts(config: ModelConfig, memory: DocumentMemory, length: int) -> Iterator[tuple[int, int]]:
    """Where the calls begin and end: first up to a block's end, then whole segments, which need no copies."""
    start = 0
    size = max(config.segment, TOKENS_AT_ONCE // config.window * config.window)
    end = -int(memory.tokens_read[0]) % config.window if length > config.window else size
    while start < length:
        end = min(end or size, length)
        yield start, end
        start, end = end, end + size


def _padded(
    rows: Sequence[NDArray[np.int64]], start: int, end: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The columns from start to end, (B, columns), and how many of them each row has; None if it has them all."""
    pieces = [row[start:end] for row in rows]
    lengths = [len(piece) for piece in pieces]
    padded = np.zeros((len(rows), max(lengths)), np.int64)
    for lane, piece in enumerate(pieces):
        padded[lane, : len(piece)] = piece
    return torch.from_numpy(padded).to(device), None if min(lengths) == max(lengths) else torch.tensor(lengths)

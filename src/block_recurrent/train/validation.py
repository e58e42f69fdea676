"""Validation during training: always on the same tokens, with the scorer of evaluation and the current weights.

The weights may be sharded over processes, which then have to make the same number of calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from block_recurrent.data import Corpus
from block_recurrent.evaluate.scoring import score
from block_recurrent.inference.engine import Scored
from block_recurrent.io.progress import Progress
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.loss import SegmentsLoss
from block_recurrent.train.parallel import reshard

SPLIT = "validation"


class Validator:
    """Scores the beginnings of the validation documents: `validator(module)` returns a record of metrics."""

    def __init__(self, corpus: Corpus, config: RunConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        lanes = config.eval.lanes or min(config.train.lanes, len(corpus.documents(SPLIT)))
        self.lanes = -(-lanes // runtime.world)
        self.texts = first_tokens(corpus, config.eval.tokens, lanes)[runtime.rank :: runtime.world]

    def __call__(self, module: SegmentsLoss, progress: Progress | None = None) -> dict[str, float]:
        """Score. Does not change weights, random number generators or the memories of training."""
        with _evaluating(module), torch.no_grad():
            scorer = TrainingScorer(module, self.runtime)
            pieces = list(score(scorer, self.texts, self.lanes, self.config.model.segment, progress=progress))
            scorer.wait_for_others()
            gain = scorer.state_gain() if self.config.model.recurrent_layers else None
        nats, tokens = self.runtime.sums(
            sum(piece.nats.sum(dtype=np.float64) for piece in pieces), sum(len(piece.nats) for piece in pieces)
        )
        result = {"bits_per_token": nats / max(tokens, 1) / math.log(2), "tokens": int(tokens)}
        return result if gain is None else result | {"state_gain": gain}


def first_tokens(corpus: Corpus, count: int, lanes: int, split: str = SPLIT) -> list[NDArray[Any]]:
    """This many tokens in total (0: the whole split), from the beginnings of documents, the longest first."""
    texts = [corpus.tokens(split, index) for index in np.argsort(-corpus.lengths(split), kind="stable")]
    if not count:
        return texts
    most, chosen = -(-count // lanes), []
    for text in texts:
        if count > 0:
            chosen.append(text[: min(most, count)])
            count -= len(chosen[-1])
    return chosen


class TrainingScorer:
    """The interface of `score` for a module in training. Keeps the call with most lanes in the middle of a document."""

    def __init__(self, module: SegmentsLoss, runtime: Runtime) -> None:
        self.module, self.runtime, self.config = module, runtime, module.config
        self._most: tuple[int, list[Tensor], DocumentMemory, Tensor] | None = None

    def score(
        self, rows: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]], memory: DocumentMemory | None
    ) -> Scored:
        self.runtime.sums(1)  # one more call, for waiting processes
        memory = memory or self._empty(len(rows))
        lengths = torch.tensor(list(map(len, rows)))
        call = [pad_sequence([torch.from_numpy(row) for row in x], batch_first=True) for x in (rows, targets)]
        call = [*(x.to(self.runtime.device) for x in call), lengths]
        nats, after = self._loss(call, memory)
        carried = sum(not fresh for fresh in memory.fresh)
        if self._most is None or carried >= self._most[0]:
            self._most = (carried, call, memory, nats)
        parts = zip(nats.cpu().numpy(), rows, strict=True)
        return Scored([part[: len(row)] for part, row in parts], after)

    def wait_for_others(self) -> None:
        """With sharded weights, a call involves all processes: make empty calls until all have finished."""
        while self.runtime.sums(0)[0]:
            self._idle()

    def state_gain(self) -> float | None:
        """Bits per token that the carried state saves compared with the initial one; None if nothing was carried.

        Repeats the call with the state reset and the window cache kept: a lane that has read nothing gets the
        learned initial state from the model, and keeps its cache.
        """
        saved, tokens = 0.0, 0
        if self._most is None:
            self._idle()
        else:
            _, call, memory, nats = self._most
            assert not (memory.tokens_read % self.config.window).any(), "lanes are at a block boundary"
            without, _ = self._loss(call, replace(memory, tokens_read=torch.zeros_like(memory.tokens_read)))
            real = torch.arange(nats.shape[1]) < call[2][:, None]
            counted = (real & (memory.tokens_read > 0)[:, None]).to(nats.device)
            saved, tokens = (without - nats).double().where(counted, 0).sum().item(), int(counted.sum())
        total, count = self.runtime.sums(saved, tokens)
        return total / count / math.log(2) if count else None

    def _loss(self, call: list[Tensor], memory: DocumentMemory) -> tuple[Tensor, DocumentMemory]:
        tokens, targets, lengths = call
        with self.runtime.autocast():
            loss = self.module.loss(tokens, targets, memory, lengths=lengths)
        return loss.per_token, loss.memory

    def _idle(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.runtime.device)
        self._loss([token, token, torch.ones(1, dtype=torch.int64)], self._empty(1))

    def _empty(self, lanes: int) -> DocumentMemory:
        return DocumentMemory.empty(self.config, lanes, self.runtime.device, cache_dtype=self.runtime.dtype)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Disable dropout in this context, and restore the mode of every module afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        reshard(module)
        for part, mode in modes:
            part.training = mode

"""Validation during training: always the same tokens, read with a memory of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from block_recurrent.data import Corpus, LaneStream
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.parallel import LanesLoss, Segment, reshard
from block_recurrent.train.step import as_tensors

SPLIT = "validation"


class Validation(NamedTuple):
    """The outcome."""

    bits_per_token: float
    tokens: int
    state_gain: float | None
    """Bits per token that the carried state saves against the initial one; None: no recurrence, or nothing to carry."""


class Validator:
    """Scores the first tokens of the validation split's documents."""

    def __init__(self, corpus: Corpus, config: RunConfig, runtime: Runtime, module: nn.Module) -> None:
        self.corpus, self.config, self.runtime, self.module = corpus, config, runtime, module
        wanted = config.eval.lanes or min(config.train.lanes, len(corpus.documents(SPLIT)))
        # Rounded up to the number of processes: lanes without a document rest.
        self.lanes = -(-wanted // runtime.world) * runtime.world
        step_tokens = wanted * config.model.segment
        self.steps = math.ceil(config.eval.tokens / step_tokens) if config.eval.tokens else None

    @torch.no_grad()
    def run(self) -> Validation:
        """Score. Leaves weights, random numbers and the training's memory as they are."""
        self.module.eval()
        try:
            return self._run()
        finally:
            reshard(self.module)
            self.module.train()

    def _run(self) -> Validation:
        model, per_rank = self.config.model, self.lanes // self.runtime.world
        memory = DocumentMemory.empty(model, per_rank, self.runtime.device)
        nats, tokens = 0.0, 0
        best = None  # the step in which most lanes are in the middle of a document
        stream = LaneStream(
            self.corpus,
            SPLIT,
            self.lanes,
            model.segment,
            rank=self.runtime.rank,
            world=self.runtime.world,
            one_pass=True,
        )
        with stream:
            for done, step in enumerate(stream):
                if done == self.steps:
                    break
                segment = as_tensors(step, slice(None), self.runtime.device)
                carried = int((~segment.starts & segment.mask.any(1).cpu()).sum())
                loss = self._score(segment, memory)
                if best is None or carried >= best[0]:
                    best = (carried, segment, memory, loss)
                memory = loss.memory
                nats += loss.text_nats.item()
                tokens += int((step.mask & (step.targets != self.corpus.mark)).sum())
        total_nats, total_tokens = self.runtime.sums(nats, tokens)
        bits = total_nats / max(total_tokens, 1) / math.log(2)
        gain = self._state_gain(*best[1:]) if best and model.recurrent_layers else None
        return Validation(bits, int(total_tokens), gain)

    def _state_gain(self, segment: Segment, memory: DocumentMemory, with_state: LanesLoss) -> float | None:
        """The same segment again, with the state forgotten and the window cache kept.

        A lane that has read nothing gets the learned initial state from the model, and keeps what its cache holds.
        """
        assert self.config.model.segment % self.config.model.window == 0, "lanes stand at a block border"
        forgetful = replace(memory, tokens_read=torch.zeros_like(memory.tokens_read))
        without_state = self._score(segment, forgetful)
        carried = (~segment.starts).to(segment.mask.device)
        saved = (without_state.lane_nats - with_state.lane_nats).where(carried, 0).sum().item()
        counted = segment.mask.sum(1).where(carried, 0).sum().item()
        total, count = self.runtime.sums(saved, counted)
        return total / count / math.log(2) if count else None

    def _score(self, segment: Segment, memory: DocumentMemory) -> LanesLoss:
        with self.runtime.autocast():
            return self.module([segment], memory)

"""The unit of work: the loss of some lanes over the segments of one update.

Everything that gradients flow through is inside `SegmentsLoss.forward`, so that DDP and FSDP see one forward and one
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from block_recurrent.data import Segment
from block_recurrent.model.checks import check_range
from block_recurrent.model.language_model import BlockRecurrentLM, Loss
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.ops import on_device

ALL = slice(None)


class SegmentsLoss(nn.Module):
    """The loss of lanes over consecutive segments; gradients flow between these, and not out of them."""

    def __init__(self, model: BlockRecurrentLM) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, segments: Sequence[Segment], memory: DocumentMemory, lanes: slice = ALL) -> Loss:
        """For the given lanes: nats of the unmasked targets, and the memory after the last segment, detached."""
        device = self.model.embedding.weight.device
        losses = []
        for segment in segments:
            tokens, targets, mask, starts = (torch.from_numpy(x[lanes]) for x in segment[:4])
            if device.type != "cpu":  # the model can't read values there without a synchronization
                check_range(tokens, self.config.vocab_size, "tokens")
                check_range(targets, self.config.vocab_size, "targets")
            # `starts` stays on the CPU: the model uses it as plain booleans.
            tokens, targets, mask = (on_device(x, device) for x in (tokens, targets, mask))
            losses.append(self.loss(tokens, targets, memory, starts, mask))
            memory = losses[-1].memory
        sums, counts, _, per_token = zip(*losses, strict=True)
        return Loss(sum(sums[1:], sums[0]), sum(counts[1:], counts[0]), memory.detach(), torch.cat(per_token, 1))

    def loss(self, *arguments: Any, **keywords: Any) -> Loss:
        """The call of the model, also if its weights are sharded."""
        for layer in self.model.layers:
            # Whether a cell's initial state is read first depends on the lanes; all processes must gather in one order.
            if isinstance(layer.cell, FSDPModule):
                layer.cell.unshard()
        return self.model.loss(*arguments, **keywords)

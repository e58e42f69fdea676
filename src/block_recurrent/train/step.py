"""One update: forward and backward over the segments of all lanes, checks, clipping, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from block_recurrent.data import Step
from block_recurrent.errors import TrainingError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.optimizer import set_rate
from block_recurrent.train.parallel import LanesLoss, Segment, gradients_kept_local
from block_recurrent.train.schedule import learning_rate


class Update(NamedTuple):
    """What one update tells, the same on every process."""

    text_nats: float
    """Over the tokens that measures count; the document mark is not one."""
    text_tokens: int
    learning_rate: float
    gradient_norm: float
    stop: bool
    """Whether any process was asked to stop."""

    @property
    def bits_per_token(self) -> float:
        return self.text_nats / max(self.text_tokens, 1) / math.log(2)


class Updater:
    """Makes updates of a model. Memories go in and come out: one for each group of lanes."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        model: BlockRecurrentLM,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.config, self.runtime = config, runtime
        self.model, self.module, self.optimizer = model, module, optimizer
        self.params = list(model.parameters())

    def update(
        self, step: int, segments: Sequence[Step], memories: list[DocumentMemory], stop: bool = False
    ) -> tuple[Update, list[DocumentMemory]]:
        """Update number `step` on consecutive segments. Anything that is not finite stops it before weights change."""
        mark = self.model.config.eos_token_id
        trained_here = sum(int(s.mask.sum()) for s in segments)
        text_here = sum(int((s.mask & (s.targets != mark)).sum()) for s in segments)
        # The mean is over the tokens of all lanes of all processes, however they are split.
        trained, text_tokens, stops = self.runtime.sums(trained_here, text_here, stop)
        losses = self._backward(segments, memories, trained)
        text_nats, gradient_norm = self._checked(step, losses)
        rate = learning_rate(self.config.schedule, step)
        self._apply(rate, gradient_norm)
        done = Update(text_nats, int(text_tokens), rate, gradient_norm, stops > 0)
        return done, [loss.memory for loss in losses]

    def _backward(self, segments: Sequence[Step], memories: list[DocumentMemory], count: float) -> list[LanesLoss]:
        """Gradients of the mean loss, group of lanes by group of lanes."""
        losses: list[LanesLoss] = []
        lanes_of_group = len(segments[0].starts) // len(memories)
        for group, memory in enumerate(memories):
            lanes = slice(group * lanes_of_group, (group + 1) * lanes_of_group)
            is_last = group == len(memories) - 1
            with nullcontext() if is_last else gradients_kept_local(self.module):
                with self.runtime.autocast():
                    loss: LanesLoss = self.module([as_tensors(s, lanes, self.runtime.device) for s in segments], memory)
                # DDP and FSDP average gradients over processes; a sum is wanted.
                (loss.total * (self.runtime.world / max(count, 1))).backward()
            losses.append(loss)
        return losses

    def _checked(self, step: int, losses: list[LanesLoss]) -> tuple[float, float]:
        """Nats of the text over all processes, and the gradient's norm, after making sure that all is finite."""
        text_nats, total = self.runtime.sums(
            sum(loss.text_nats for loss in losses), sum(loss.total.detach() for loss in losses)
        )
        if not (math.isfinite(total) and math.isfinite(text_nats)):
            self._stop_for_loss(step, torch.cat([loss.lane_nats for loss in losses]))
        norm = gradient_norm(self.params)
        if not math.isfinite(norm):
            self._stop_for_gradient(step)
        return text_nats, norm

    def _apply(self, rate: float, norm: float) -> None:
        if 0 < self.config.train.clip < norm:
            torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], self.config.train.clip / norm)
        set_rate(self.optimizer, rate)
        for p in self.params:
            if p.grad is None:  # not used in this step: an initial state while no document starts
                p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _stop_for_loss(self, step: int, lane_nats: Tensor) -> None:
        lanes = [lane for nats in self.runtime.gather(lane_nats.tolist()) for lane in nats]
        bad = [lane for lane, nats in enumerate(lanes) if not math.isfinite(nats)]
        where = f"lane {bad[0]}" if bad else "the sum over lanes"
        more = f" (and of {len(bad) - 1} more)" if len(bad) > 1 else ""
        value = lanes[bad[0]] if bad else math.inf
        raise TrainingError(f"step {step}: the loss of {where}{more} is {value}; {_NOTHING_CHANGED}")

    def _stop_for_gradient(self, step: int) -> None:
        bad = [name for name, p in self.model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
        names = sorted({name for names in self.runtime.gather(bad) for name in names})
        where = f"the gradient of '{names[0]}'" if names else "the norm of the gradient"
        more = f" (and of {len(names) - 1} more parameters)" if len(names) > 1 else ""
        raise TrainingError(f"step {step}: {where}{more} is not finite; {_NOTHING_CHANGED}")


_NOTHING_CHANGED = (
    "weights were not updated, and checkpoints are as they were; "
    "go on from the last one with a lower schedule.learning_rate, or with train.clip"
)


def as_tensors(step: Step, lanes: slice, device: torch.device) -> Segment:
    """Some lanes of a step, on the device."""
    tokens, targets, mask = (torch.from_numpy(x[lanes]).to(device) for x in (step.tokens, step.targets, step.mask))
    return Segment(tokens, targets, mask, torch.from_numpy(step.starts[lanes]))


def gradient_norm(params: Sequence[Tensor]) -> float:
    """The L2 norm of all gradients together, over all processes."""
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _is_finite(x: Tensor) -> bool:
    local = x.to_local() if isinstance(x, DTensor) else x
    return bool(local.isfinite().all())

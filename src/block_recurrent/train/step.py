"""One update: forward and backward over the segments of all lanes, checks, clipping, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from block_recurrent.data import Segment
from block_recurrent.errors import TrainingError
from block_recurrent.model.language_model import BlockRecurrentLM, Loss
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.optimizer import set_rate
from block_recurrent.train.parallel import gradients_kept_local
from block_recurrent.train.schedule import learning_rate
from block_recurrent.train.sharding import local, whole


class Update(NamedTuple):
    """Results of an update, the same on every process."""

    text_nats: float  # over the tokens that are measured, which excludes the document mark
    text_tokens: int
    learning_rate: float
    gradient_norm: float
    stop: bool  # whether any process was asked to stop
    nats: NDArray[np.float32]  # (lanes, bptt * segment) the loss of each target of this process, masked or not
    watched: dict[str, float]  # the values of `watch`

    @property
    def bits_per_token(self) -> float:
        return self.text_nats / max(self.text_tokens, 1) / math.log(2)


class Updater:
    """Runs updates of a model. Takes and returns one memory per group of lanes."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        model: BlockRecurrentLM,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        watch: Callable[[list[DocumentMemory]], dict[str, Tensor]] = lambda memories: {},
    ) -> None:
        """`watch`: metrics of an update by name, given the memories after it."""
        self.config, self.runtime, self.watch = config, runtime, watch
        self.model, self.module, self.optimizer = model, module, optimizer
        self.params = [p for p in model.parameters() if p.requires_grad]

    def update(
        self,
        step: int,
        last_step: int,
        segments: Sequence[Segment],
        memories: list[DocumentMemory],
        stop: bool = False,
    ) -> tuple[Update, list[DocumentMemory]]:
        """Run update number `step` on consecutive segments. Stops before weights change if anything is not finite."""
        mask, targets = (np.concatenate([s[index] for s in segments], 1) for index in (2, 1))
        text = mask & (targets != self.model.config.eos_token_id)
        # The mean is over the tokens of all lanes of all processes.
        trained, text_tokens, stops = self.runtime.sums(mask.sum(), text.sum(), stop)
        losses = self._backward(segments, memories, trained)
        memories = [loss.memory for loss in losses]
        # Everything that Python needs, in one copy: a single synchronization with the device.
        total, watched = torch.stack([loss.sum.detach() for loss in losses]).sum(), self.watch(memories)
        told = torch.stack([total, gradient_norm(self.params), *watched.values()])
        numbers = torch.cat([told, *(loss.per_token.flatten() for loss in losses)]).cpu().numpy()
        (total_nats, norm, *values), nats = numbers[: len(told)].tolist(), numbers[len(told) :].reshape(mask.shape)
        text_nats, total_nats = self.runtime.sums(nats.sum(where=text, dtype=np.float64), total_nats)
        if not (math.isfinite(total_nats) and math.isfinite(text_nats)):
            self._stop_for_loss(step, nats.sum(1, where=mask, dtype=np.float64))
        if not math.isfinite(norm):
            self._stop_for_gradient(step)
        rate = learning_rate(self.config.schedule, step, last_step)
        self._apply(rate, norm)
        metrics = dict(zip(watched, values, strict=True))
        return Update(text_nats, int(text_tokens), rate, norm, stops > 0, nats, metrics), memories

    def _backward(self, segments: Sequence[Segment], memories: list[DocumentMemory], count: float) -> list[Loss]:
        """Gradients of the mean loss, accumulated over groups of lanes."""
        losses: list[Loss] = []
        lanes_of_group = len(segments[0].starts) // len(memories)
        for group, memory in enumerate(memories):
            lanes = slice(group * lanes_of_group, (group + 1) * lanes_of_group)
            is_last = group == len(memories) - 1
            with nullcontext() if is_last else gradients_kept_local(self.module, self.config.train.keep_gathered):
                with self.runtime.autocast():
                    loss: Loss = self.module(segments, memory, lanes)
                # DDP and FSDP average gradients over processes; this needs the sum.
                (loss.sum * (self.runtime.world / max(count, 1))).backward()
            losses.append(loss)
        return losses

    def _apply(self, rate: float, norm: float) -> None:
        if 0 < self.config.train.clip < norm:
            torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], self.config.train.clip / norm)
        set_rate(self.optimizer, rate)
        for p in self.params:
            if p.grad is None:  # with a single block, the next state is only used by the memory
                p.grad = torch.zeros_like(p)
        with self.runtime.autocast():  # for the products of Muon
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _stop_for_loss(self, step: int, lane_nats: NDArray[np.float64]) -> None:
        lanes = [lane for nats in self.runtime.gather(lane_nats.tolist()) for lane in nats]
        bad = [lane for lane, nats in enumerate(lanes) if not math.isfinite(nats)]
        where = f"lane {bad[0]}" if bad else "the sum over lanes"
        more = f" (and of {len(bad) - 1} more)" if len(bad) > 1 else ""
        value = lanes[bad[0]] if bad else math.inf
        raise TrainingError(f"step {step}: the loss of {where}{more} is {value}; {_NOTHING_CHANGED}")

    def _stop_for_gradient(self, step: int) -> None:
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        bad = [name for name, grad in grads.items() if not local(grad).isfinite().all()]
        names = sorted({name for names in self.runtime.gather(bad) for name in names})
        where = f"the gradient of '{names[0]}'" if names else "the norm of the gradient"
        more = f" (and of {len(names) - 1} more parameters)" if len(names) > 1 else ""
        raise TrainingError(f"step {step}: {where}{more} is not finite; {_NOTHING_CHANGED}")


_NOTHING_CHANGED = (
    "weights were not updated, and checkpoints are unchanged; "
    "resume from the last one with a lower schedule.learning_rate, or with train.clip"
)


def gradient_norm(params: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, over all processes."""
    return whole(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))

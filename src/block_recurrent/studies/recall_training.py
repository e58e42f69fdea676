"""Training on planted names: distances that grow as they are mastered, and gates that may move fast.

What made the difference is written down in docs/recall.md.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from block_recurrent.config import ModelConfig
from block_recurrent.errors import TrainingError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.nn.gates import FixedGate
from block_recurrent.run_config import OptimizerConfig
from block_recurrent.studies.planted import LessonLanes, LessonStep, PlantedNames
from block_recurrent.train.optimizer import make_optimizer, set_rate


@dataclass(frozen=True)
class RecallTraining:
    """How to train."""

    steps: int = 2000
    """At most so many updates."""
    settle: int = 300
    """Of these the last ones, over which the learning rate falls to nothing."""
    tokens_per_step: int = 2048
    """Lanes are as many as give so many tokens: systems with other segments see as much text per update."""
    learning_rate: float = 3e-3
    gate_rate: float = 10.0
    """Times the learning rate, for the biases of gates: how long the state lasts is a matter of these few numbers."""
    asked_weight: float = 10.0
    """Weight of an asked name in the loss; noise has 1."""
    gap: float = 20.0
    """Tokens between questions, on average."""
    say_again: float = 0.05
    """Share of answers that are said, in half of the documents."""
    first: int = 0
    """Documents of the first stage are so long; 0: four windows, or one segment if that is longer."""
    longest: int = 2048
    """Documents of the last stage are so long."""
    mastered: float = 0.5
    """Bits of an asked name under which the documents become twice as long."""
    seed: int = 0


@dataclass
class Stages:
    """The curriculum: twice as long as soon as the far half of the present lengths is mastered."""

    longest: int
    last: int
    mastered: float
    enough: int = 300
    """Far names that are looked at."""
    finished: bool = False
    _recent: deque[float] = field(default_factory=deque)

    def observe(self, bits: NDArray[np.float64]) -> bool:
        """Bits of names asked at far distances of the present stage. Returns whether the stage has ended."""
        self._recent.extend(bits.tolist())
        while len(self._recent) > self.enough:
            self._recent.popleft()
        if self.finished or len(self._recent) < self.enough or np.mean(self._recent) >= self.mastered:
            return False
        self._recent.clear()
        self.finished = self.longest >= self.last
        self.longest = min(2 * self.longest, self.last)
        return True


@dataclass(frozen=True)
class RecallProgress:
    """What one update tells."""

    step: int
    longest: int
    near_bits: float
    far_bits: float
    keep: float | None
    seconds: float


Schedule = list[tuple[int, int]]
"""(step, longest documents from this step on), and at last (step, 0): the learning rate falls from here."""


def train_recall(
    config: ModelConfig,
    task: PlantedNames,
    settings: RecallTraining,
    schedule: Schedule | None = None,
    tell: Callable[[RecallProgress], None] | None = None,
) -> tuple[BlockRecurrentLM, Schedule]:
    """Train a model; returns it in eval mode, and its schedule of stages.

    schedule: the stages of another model, to be taught exactly the same; None: by mastery.
    """
    torch.manual_seed(settings.seed)
    model = BlockRecurrentLM(config).train()
    optimizer = make_optimizer(model, OptimizerConfig("adamw", beta2=0.98, gate_rate=settings.gate_rate))
    num_lanes = max(1, settings.tokens_per_step // config.segment)
    lanes = LessonLanes(task, num_lanes, config.segment, settings.gap, settings.say_again, settings.seed)
    memory = DocumentMemory.empty(config, num_lanes)
    first = max(config.segment, settings.first or 4 * config.window)
    stages = Stages(first, max(first, settings.longest), settings.mastered)
    course: Schedule = [(1, first)] if schedule is None else schedule
    began, step, falls_from = time.perf_counter(), 0, None
    while falls_from is None or step < falls_from + settings.settle - 1:
        step += 1
        if schedule is not None:
            stages.longest = max(longest for start, longest in schedule if start <= step)
            falls_from = schedule[-1][0] if step >= schedule[-1][0] else None
        lesson = lanes.step(stages.longest)
        rate = settings.learning_rate * min(1.0, step / 50)
        if falls_from is not None:
            rate *= 1 - (step - falls_from) / settings.settle
        bits, memory = _update(model, optimizer, lesson, memory, settings, rate, step)
        far = lesson.distance > max(task.window, stages.longest // 2)
        near = (lesson.distance > 0) & ~far
        if schedule is None:
            if stages.observe(bits[far]):
                course.append((step + 1, 0 if stages.finished else stages.longest))
            elif step == settings.steps - settings.settle and not stages.finished:
                stages.finished = True
                course.append((step + 1, 0))
            falls_from = course[-1][0] if stages.finished else None
        if tell:
            tell(
                RecallProgress(
                    step, stages.longest, _mean(bits[near]), _mean(bits[far]), mean_keep(model),
                    time.perf_counter() - began,
                )
            )  # fmt: skip
    return model.eval(), course


def _update(
    model: BlockRecurrentLM,
    optimizer: torch.optim.Optimizer,
    lesson: LessonStep,
    memory: DocumentMemory,
    settings: RecallTraining,
    rate: float,
    step: int,
) -> tuple[NDArray[np.float64], DocumentMemory]:
    """One update; returns the bits of every target, and the memory for the next."""
    hidden, after = model.hidden(torch.from_numpy(lesson.tokens), memory, torch.from_numpy(lesson.starts))
    logits = (hidden @ model.embedding.weight.T).flatten(0, 1)
    nats = F.cross_entropy(logits, torch.from_numpy(lesson.targets).flatten(), reduction="none")
    weights = torch.where(torch.from_numpy(lesson.asked).flatten(), settings.asked_weight, 1.0)
    loss = (nats * weights).sum() / weights.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise TrainingError(
            f"step {step}: the loss is {loss.item()}, the gradient's norm {norm.item()}: try a lower --lr"
        )
    set_rate(optimizer, rate)
    optimizer.step()
    bits = nats.detach().double().numpy().reshape(lesson.targets.shape) / math.log(2)
    return bits, after.detach()


def mean_keep(model: BlockRecurrentLM) -> float | None:
    """The mean of all fixed gates: the share of the old state that a block leaves; None if there are none."""
    gates = [module.bias.sigmoid().mean() for module in model.modules() if isinstance(module, FixedGate)]
    return torch.stack(gates).mean().item() if gates else None


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan

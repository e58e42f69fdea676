"""Learning rates by update, counted from 1."""

from __future__ import annotations

import math

from block_recurrent.run_config import ScheduleConfig


def learning_rate(config: ScheduleConfig, step: int, last_step: int) -> float:
    """The learning rate of update number `step` of `last_step`: the curve of the schedule times a linear warm-up."""
    assert step >= 1, "updates are counted from 1"
    return _curve(config, step, last_step) * min(step / max(config.warmup, 1), 1.0)


def _curve(config: ScheduleConfig, step: int, last_step: int) -> float:
    first, last = config.learning_rate, config.final_learning_rate
    if config.kind == "inverse-sqrt":
        return first / math.sqrt(max(step, config.warmup))
    if config.kind == "constant":
        return first
    if config.kind == "wsd":
        return last + (first - last) * min((last_step - step + 1) / config.decay_steps, 1.0)
    done = min(step / config.decay_steps, 1.0)
    if config.kind == "cosine":
        return last + (first - last) * (1 + math.cos(math.pi * done)) / 2
    return first + (last - first) * done

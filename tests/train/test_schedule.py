"""Learning rates against the numbers of the paper."""

from __future__ import annotations

import math

import pytest

from block_recurrent.run_config import ScheduleConfig
from block_recurrent.train.schedule import learning_rate as rate_of


def learning_rate(config: ScheduleConfig, step: int, last_step: int = 0) -> float:
    return rate_of(config, step, last_step)


def test_inverse_square_root() -> None:
    config = ScheduleConfig()
    assert learning_rate(config, 1) == pytest.approx(1 / math.sqrt(1000) / 1000)
    assert learning_rate(config, 1000) == pytest.approx(0.0316, abs=5e-5), "0.03 at its peak"
    assert learning_rate(config, 500_000) == pytest.approx(0.0014, abs=2e-5)
    assert max(range(1, 3000), key=lambda step: learning_rate(config, step)) == 1000


def test_cosine() -> None:
    config = ScheduleConfig(kind="cosine", learning_rate=0.01, final_learning_rate=0.001, warmup=10, decay_steps=200)
    assert learning_rate(config, 100) == pytest.approx(0.0055)
    assert learning_rate(config, 200) == pytest.approx(0.001)
    assert learning_rate(config, 999) == pytest.approx(0.001)
    assert learning_rate(config, 5) == pytest.approx((0.001 + 0.0045 * (1 + math.cos(math.pi / 40))) / 2)


def test_linear_and_constant() -> None:
    linear = ScheduleConfig(kind="linear", learning_rate=0.01, final_learning_rate=0.002, warmup=0, decay_steps=100)
    assert [learning_rate(linear, s) for s in (1, 50, 100, 101)] == pytest.approx([0.00992, 0.006, 0.002, 0.002])
    constant = ScheduleConfig(kind="constant", learning_rate=0.01, warmup=4)
    assert [learning_rate(constant, s) for s in (1, 2, 4, 100)] == pytest.approx([0.0025, 0.005, 0.01, 0.01])


def test_warmup_stable_decay() -> None:
    config = ScheduleConfig(kind="wsd", learning_rate=0.01, final_learning_rate=0.002, warmup=4, decay_steps=4)
    rates = [learning_rate(config, step, last_step=10) for step in (2, 4, 6, 7, 8, 9, 10)]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.008, 0.006, 0.004])

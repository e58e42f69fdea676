"""A micro run learns, along a curve that is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.data import Segment
from block_recurrent.run_config import RunConfig
from block_recurrent.train.loop import train

from .conftest import read_metrics

CURVE = Path(__file__).with_name("micro_run.json")


def test_loss_curve(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """50 steps of rec-fixed-skip, seed 0, dropout off (its random numbers may differ between versions of torch).

    `micro_run.json` was written by this test's own configuration; a change of it is a change of the recipe. To make it
    anew: python -m pytest tests/train/test_learning.py --basetemp DIR, and take the bits from DIR/.../metrics.jsonl.
    """
    settings = {
        "train.steps": 50,
        "train.lanes": 8,
        "eval.every": 0,
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
    }
    train(make_config(**settings), tmp_path)
    bits = [line["bits_per_token"] for line in read_metrics(tmp_path, "train")]
    assert len(bits) == 50
    assert bits[0] == pytest.approx(math.log2(257), abs=1.5), "at first all bytes are about equally likely"
    assert bits[-1] < 0.6 * bits[0]
    assert bits == pytest.approx(json.loads(CURVE.read_text())["bits_per_token"], rel=1e-3)


def test_bptt_reaches_further_back(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """With --bptt 2, an update reads two segments, and its loss has gradients from the second into the first."""
    train(make_config(**{"train.steps": 4, "train.bptt": 2, "eval.every": 0}), tmp_path)
    lines = read_metrics(tmp_path, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["tokens"] == 2 * 4 * 64

    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", 257, dropout=0.0, attention_dropout=0.0))
    from block_recurrent.model.memory import DocumentMemory
    from block_recurrent.train.loss import SegmentsLoss

    tokens = np.random.default_rng(0).integers(256, size=(2, 1, 64))
    mask = np.ones((1, 64), np.bool_)
    first, second = (Segment(t, t, mask, np.array([i == 0])) for i, t in enumerate(tokens))
    ignored = first._replace(mask=~mask)
    SegmentsLoss(model)([ignored, second], DocumentMemory.empty(model.config, 1)).sum.backward()
    through_time = model.layers[1].cell.initial_state.grad
    assert through_time is not None
    assert through_time.abs().max() > 0, "the loss of the second segment reaches the state before the first"

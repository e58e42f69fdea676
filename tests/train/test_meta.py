"""A training step on tensors without data: nothing waits for a GPU, products are in bfloat16, and little is kept."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.ops import triton
from block_recurrent.ops.precision import MetaAutocast, product_dtype
from block_recurrent.presets import preset
from block_recurrent.train.meta import Trace, trace_step

# Kernels of forward and backward pass at 160m with one lane: no more than this (results/kernel-counts.md).
MOST_KERNELS = {
    "slide-plus": 952,
    "rec-fixed-skip": 1379,
    "rec-lstm-dual": 1900,
    "feedback-fixed-skip": 6300,
    "memorizing": 870,
}
MOST_SAVED = {"slide-plus": 2.6, "rec-fixed-skip": 2.7, "rec-lstm-dual": 2.9, "feedback-fixed-skip": 3.4}
"""GiB."""


def test_every_system_trains_without_waiting(system):
    """Reading a number, `nonzero` and a branch on a tensor are errors on this device."""
    trace = trace_step(preset(system, "micro", vocab_size=50), lanes=2)
    assert trace.forward.waits == trace.backward.waits == []
    assert trace.forward.kernels
    assert trace.backward.kernels


@pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
@pytest.mark.parametrize("name", MOST_KERNELS)
def test_the_budget_at_160m(name):
    trace = trace_step(preset(name, "160m", vocab_size=32000))
    assert trace.forward.waits == trace.backward.waits == []
    products = trace.forward.products + trace.backward.products
    assert max((flops for dtype, flops in products if dtype == torch.float32), default=0) <= 1e9
    assert sum((trace.forward.kernels + trace.backward.kernels).values()) <= MOST_KERNELS[name]
    assert trace.saved_bytes <= MOST_SAVED.get(name, 1.0) * 2**30


def test_a_copy_that_waits_is_seen():
    with Trace() as trace:
        torch.ones(3).to("meta", non_blocking=True)
        assert trace.waits == []
        torch.ones(3).to("meta")
    assert len(trace.waits) == 1


def test_autocast_without_data():
    """As on a GPU: products in the lower precision, parameters cast once, nothing else."""
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    x = torch.empty(2, 8, device="meta")
    with Trace() as trace, MetaAutocast(torch.bfloat16):
        assert product_dtype(x) == torch.bfloat16
        first, second = x @ weight, x @ weight
        assert (x + x).dtype == torch.float32
    assert first.dtype == second.dtype == torch.bfloat16
    assert [dtype for dtype, _ in trace.products] == [torch.bfloat16] * 2
    assert trace.products[0][1] == 2 * 2 * 8 * 8
    assert trace.kernels["_to_copy"] == 3
    assert product_dtype(x) == torch.float32

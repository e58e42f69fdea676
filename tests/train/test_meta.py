"""A training step on tensors without data: nothing waits for a GPU, products are in bfloat16, and little is kept."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from block_recurrent import BlockRecurrentLM
from block_recurrent.data import Segment
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.ops import triton
from block_recurrent.ops.precision import MetaAutocast, product_dtype
from block_recurrent.presets import preset
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.dry_run import activation_bytes
from block_recurrent.train.gate_metrics import GateActivations, state_norms
from block_recurrent.train.loop import Trainer
from block_recurrent.train.loss import SegmentsLoss
from block_recurrent.train.meta import SavedBytes, Trace, trace_step
from block_recurrent.train.optimizer import make_optimizer
from block_recurrent.train.step import Updater

# Kernels of forward and backward pass at 160m with one lane: half of those of 0.1.0, with block feedback a quarter.
MOST_KERNELS = {
    "slide-plus": 952,
    "rec-fixed-skip": 1379,
    "rec-lstm-dual": 1693,
    "feedback-fixed-skip": 4471,
    "memorizing": 859,
}
MOST_SAVED = 2.6 * 2**30
TRAINING = Path(__file__).parents[2] / "docs" / "training.md"


def test_every_system_trains_without_waiting(system):
    """Reading a number, `nonzero` and a branch on a tensor are errors on this device."""
    trace = trace_step(preset(system, "micro", vocab_size=50), lanes=2)
    assert trace.forward.waits == trace.backward.waits == []
    assert trace.forward.kernels
    assert trace.backward.kernels


@pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
def test_the_budget_at_160m(system):
    trace = trace_step(preset(system, "160m", vocab_size=32000))
    assert trace.forward.waits == trace.backward.waits == []
    products = trace.forward.products + trace.backward.products
    assert max((flops for dtype, flops in products if dtype == torch.float32), default=0) <= 1e9
    if system in MOST_KERNELS:
        assert sum((trace.forward.kernels + trace.backward.kernels).values()) <= MOST_KERNELS[system]
    assert trace.saved_bytes <= MOST_SAVED
    config = RunConfig(system=system, size="160m", model=preset(system, "160m", vocab_size=32000))
    estimate = activation_bytes(config, Runtime(torch.device("meta"), torch.bfloat16), lanes=1)
    assert estimate == pytest.approx(trace.saved_bytes, rel=0.1)


class Host(Trace):
    """Copies to the CPU give zeros, and are counted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("cpu"):
            self.waits.append("to the host")
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def a_group():
    """A process group, with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["slide-plus", "rec-fixed-skip", "rec-lstm-dual", "feedback-fixed-skip", "memorizing"])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_an_update_waits_once(make_config, name, optimizer):
    check_that_updates_wait_once(make_config(name, **{"optimizer.name": optimizer}))


@pytest.mark.usefixtures("a_group")
def test_an_update_of_several_processes_waits_once(make_config):
    """What they add up are numbers of Python, which do not pass through the device."""
    check_that_updates_wait_once(make_config("rec-lstm-dual"), world=2)


def check_that_updates_wait_once(config, world=1):
    """Forward, backward, checks, what is watched, clipping and the optimizer's step, in two groups of lanes."""
    config = config.replace("train", clip=1.0, accumulate=2)
    with torch.device("meta"):
        model = BlockRecurrentLM(config.model)
    runtime = Runtime(torch.device("meta"), torch.bfloat16, world=world)
    gates, module = GateActivations(model), SegmentsLoss(model)

    def watch(memories):
        return gates.take() | state_norms(memories)

    updater = Updater(config, runtime, model, module, make_optimizer(model, config.optimizer), watch)
    lanes, length = 4, config.model.segment
    tokens = np.zeros((lanes, length), dtype=np.int64)
    mask, starts = np.ones_like(tokens, dtype=bool), np.arange(lanes) % 2 == 0  # half of the documents begin
    segment = Segment(tokens, tokens, mask, starts, tokens)
    memories = [DocumentMemory.empty(config.model, 2, "meta") for _ in range(2)]
    with Host() as host:
        update, memories = updater.update(1, 10, [segment], memories)
        update, memories = updater.update(2, 10, [segment], memories)
    assert host.waits == ["to the host"] * 2
    assert {dtype for dtype, _ in host.products} == {torch.bfloat16}
    assert update.nats.shape == (lanes, length)
    assert {name.split("/")[0] for name in update.watched} == {f"layer{n}" for n in config.model.recurrent_layers}


@pytest.mark.parametrize("name", ["slide", "rec-lstm-dual", "feedback-fixed-skip"])
def test_the_estimate_is_what_a_step_keeps(make_config, name):
    """Of the lanes of a real step, on this CPU."""
    config = make_config(name)
    trainer = Trainer(config, Runtime(torch.device("cpu"), torch.float32))
    with trainer.stream, SavedBytes(trainer.state.model) as saved:
        trainer.update(1, trainer.next_segments())
    estimate = activation_bytes(config, trainer.runtime, config.train.lanes)
    assert estimate == pytest.approx(saved.total, rel=0.1)


@pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
@pytest.mark.parametrize("size", ["40m", "80m", "160m", "325m", "650m", "1.3b"])
def test_the_table_of_the_documentation(size):
    """Activations of a lane, kept and computed again, in docs/training.md."""
    (row,) = re.findall(rf"^\| {size} \|(.*)\|$", TRAINING.read_text(), flags=re.MULTILINE)
    told = [float(cell.split()[0]) for cell in row.split("|")[3:5]]
    config = RunConfig(system="rec-fixed-skip", size=size, model=preset("rec-fixed-skip", size, vocab_size=32000))
    runtime = Runtime(torch.device("meta"), torch.bfloat16)
    again = config.replace("train", checkpoint_activations=True)
    counted = [activation_bytes(one, runtime, lanes=1) / 2**30 for one in (config, again)]
    assert told == pytest.approx(counted, rel=0.1)


def test_a_copy_that_waits_is_seen():
    with Trace() as trace:
        torch.ones(3).to("meta", non_blocking=True)
        assert trace.waits == []
        on_device = torch.ones(3).to("meta")
        assert len(trace.waits) == 1
        on_device * torch.tensor(2.0)  # a number is an argument of the kernel
        assert len(trace.waits) == 1
        torch.tensor([1, 2], device="meta")
        torch.tensor(1.0, device="meta")
        on_device[[0, 2]]
        on_device.copy_(torch.ones(3))
        on_device.fill_(torch.tensor(1.0).to("meta"))
    assert len(trace.waits) == 6


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

"""One process or many: what DDP and FSDP2 wrap, and how layers are compiled or computed again.

`SegmentsLoss` is the unit of work: the loss of some lanes over the segments of one update. Everything that gradients
flow through is inside its `forward`, so that DDP and FSDP see one forward and one backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import TrainConfig


class Segment(NamedTuple):
    """One segment of some lanes, as tensors. `starts` stays on the CPU: the model wants it as plain booleans."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    starts: Tensor


class LanesLoss(NamedTuple):
    """What `SegmentsLoss` returns."""

    total: Tensor
    """Nats over everything that is trained on, the document mark too; with gradient."""
    lane_nats: Tensor
    """(B,) the same by lane; no gradient."""
    text_nats: Tensor
    """Nats over the tokens that measures count: the document mark is not one (SPEC section 11); no gradient."""
    memory: DocumentMemory
    """After the last segment, detached."""


class SegmentsLoss(nn.Module):
    """The loss of lanes over consecutive segments; gradients flow between these, and not out of them."""

    def __init__(self, model: BlockRecurrentLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, segments: list[Segment], memory: DocumentMemory) -> LanesLoss:
        for layer in self.model.layers:
            # Whether a cell's initial state is read first hangs on the lanes: all processes must gather in one order.
            if isinstance(layer.cell, FSDPModule):
                layer.cell.unshard()
        mark = self.model.config.eos_token_id
        totals, lane_nats, text_nats = [], [], []
        for segment in segments:
            loss = self.model.loss(segment.tokens, segment.targets, memory, segment.starts, segment.mask)
            memory = loss.memory
            totals.append(loss.sum)
            lane_nats.append(loss.per_token.where(segment.mask, 0).double().sum(1))
            text_nats.append(loss.per_token.where(segment.mask & (segment.targets != mark), 0).double().sum())
        return LanesLoss(sum(totals[1:], totals[0]), sum(lane_nats), sum(text_nats), memory.detach())  # type: ignore[arg-type]


def prepare_layers(model: BlockRecurrentLM, config: TrainConfig) -> None:
    """Compile layers, and compute them again in the backward pass, as the configuration asks. Names stay the same."""
    for layer in model.layers:
        forward: Callable[..., Any] = layer.forward
        if config.compile:
            forward = torch.compile(forward)
        if config.checkpoint_activations:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not layer.forward:
            layer.forward = forward


def distribute(model: BlockRecurrentLM, config: TrainConfig, world: int) -> nn.Module:
    """The module to call: plain, under DDP, or with the model's weights sharded in place."""
    module = SegmentsLoss(model)
    if not torch.distributed.is_initialized():
        return module
    if config.parallel == "fsdp":
        _shard(model)
        fully_shard(module)
        return module
    if world == 1:
        return module
    # With a single block in an update, the next state feeds nothing but the memory: its weights get no gradient.
    single_block = model.config.segment * config.bptt == model.config.window
    return DistributedDataParallel(module, find_unused_parameters=single_block and bool(model.config.recurrent_layers))


def _shard(model: BlockRecurrentLM) -> None:
    """Each layer a unit, gathered while it is used, and sharded again at once.

    A recurrent cell is a unit of its own: its initial state is read outside of its layer's forward, and in block
    feedback other layers read its keys and values. It stays gathered from its first use to the end of the backward
    pass, since a view of a weight would otherwise lose what it views. With block feedback that goes for every layer,
    each being used once a block.
    """
    # Layers return views of what they compute; FSDP warns of changing these in place, which nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for layer in model.layers:
        if isinstance(layer.cell, nn.Module):
            fully_shard(layer.cell, reshard_after_forward=False)
            _gather_for(layer.cell, "fresh_state", "view", "scan")
        fully_shard(layer, reshard_after_forward=not model.config.feedback)


def _gather_for(cell: nn.Module, *methods: str) -> None:
    """Let FSDP treat calls of these methods as it treats `forward`; a call inside of another is part of that one."""
    under_way: list[str] = []

    def entry(name: str, plain: Callable[..., Any], gathered: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if under_way:
                return plain(*args, **kwargs)
            under_way.append(name)
            try:
                return gathered(*args, **kwargs)
            finally:
                under_way.pop()

        return call

    for name in methods:
        plain = getattr(cell, name)
        register_fsdp_forward_method(cell, name)
        setattr(cell, name, entry(name, plain, getattr(cell, name)))


@contextmanager
def gradients_kept_local(module: nn.Module) -> Iterator[None]:
    """Backward passes inside add to the gradients, without talking to other processes."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        with nullcontext():
            yield


def reshard(module: nn.Module) -> None:
    """After forward passes without a backward pass: let go of gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()

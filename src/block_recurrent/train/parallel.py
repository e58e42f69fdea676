"""One process or many: what DDP and FSDP2 wrap, and how layers are compiled or computed again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.run_config import TrainConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.loss import SegmentsLoss


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


def distribute(module: SegmentsLoss, config: TrainConfig, runtime: Runtime) -> nn.Module:
    """The module to call in training: as it is, under DDP, or with the model's weights sharded in place.

    Where the computation is in bfloat16, so is most of what processes send to each other. DDP: gradients. FSDP: the
    weights of layers; gradients are summed in float32, for each process keeps but its shard of the sum.
    """
    model = module.model
    if not dist.is_initialized():
        return module
    if config.parallel == "fsdp":
        _shard(model, runtime.dtype, config.keep_gathered)
        fully_shard(module)
        register_fsdp_forward_method(module, "loss")
        return module
    if runtime.world == 1:
        return module
    # With a single block in an update, the next state feeds nothing but the memory: its weights get no gradient.
    single_block = model.config.segment * config.bptt == model.config.window
    unused = single_block and bool(model.config.recurrent_layers)
    # Gradients are views of the buckets that are sent: no copy, and no second place in memory.
    parallel = DistributedDataParallel(module, find_unused_parameters=unused, gradient_as_bucket_view=True)
    if runtime.dtype == torch.bfloat16:
        parallel.register_comm_hook(None, lambda state, bucket: _mean_in_bfloat16(bucket))
    return parallel


def _mean_in_bfloat16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients over processes. As torch's `bf16_compress_hook`, which is for NCCL only."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _shard(model: BlockRecurrentLM, dtype: torch.dtype, keep_gathered: bool) -> None:
    """Each layer a unit, gathered in the dtype of products: once for an update, or whenever it is used.

    A recurrent cell is a unit of its own: its initial state is read outside of its layer's forward, and in block
    feedback other layers read its keys and values. It stays gathered from its first use to the end of the backward
    pass, since a view of a weight would otherwise lose what it views. With block feedback that goes for every layer,
    each being used once a block. Cells and embeddings are gathered as they are: the state and the residual stream are
    made of them without a product, and would be rounded.
    """
    reduced = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Layers return views of what they compute; FSDP warns of changing these in place, which nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for layer in model.layers:
        if isinstance(layer.cell, nn.Module):
            fully_shard(layer.cell, reshard_after_forward=False)
            _gather_for(layer.cell, "fresh_state", "weights", "view", "scan")
        kept = keep_gathered or model.config.feedback
        fully_shard(layer, reshard_after_forward=not kept, mp_policy=policy)
        if model.config.feedback:
            _gather_for(layer, "weights")


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
def gradients_kept_local(module: nn.Module, keep_gathered: bool = True) -> Iterator[None]:
    """Backward passes inside add to the gradients, without talking to other processes; weights may stay gathered."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(not keep_gathered)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
            module.set_reshard_after_backward(True)
    else:
        with nullcontext():
            yield


def reshard(module: nn.Module) -> None:
    """After forward passes without a backward pass: let go of gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()

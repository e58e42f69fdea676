"""Parallel training with DDP and FSDP2, compilation of layers, and activation checkpointing."""

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
    """Compile layers, and recompute them in the backward pass, as configured. Parameter names don't change."""
    for layer in model.layers:
        forward: Callable[..., Any] = layer.forward
        if config.compile:
            forward = torch.compile(forward)
        if config.checkpoint_activations:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not layer.forward:
            layer.forward = forward


def distribute(module: SegmentsLoss, config: TrainConfig, runtime: Runtime) -> nn.Module:
    """The module to call in training: unchanged, wrapped in DDP, or with the model's weights sharded in place.

    With bfloat16, DDP reduces gradients in bfloat16; FSDP gathers the weights of layers in bfloat16, and reduces
    gradients in float32.
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
    # With a single block per update, the next state is only used by the memory: its weights get no gradient.
    single_block = model.config.segment * config.bptt == model.config.window
    unused = single_block and bool(model.config.recurrent_layers)
    # Gradients are views of the communication buckets: no copy, and no extra memory.
    parallel = DistributedDataParallel(module, find_unused_parameters=unused, gradient_as_bucket_view=True)
    if runtime.dtype == torch.bfloat16:
        parallel.register_comm_hook(None, lambda state, bucket: _mean_in_bfloat16(bucket))
    return parallel


def _mean_in_bfloat16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients over processes, like torch's `bf16_compress_hook`, which is for NCCL only."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _shard(model: BlockRecurrentLM, dtype: torch.dtype, keep_gathered: bool) -> None:
    """Each layer is a unit, gathered in the dtype of products: once per update, or for every computation.

    A recurrent cell is a separate unit: its initial state is read outside of its layer's forward, and in block
    feedback other layers read its keys and values. It stays gathered from its first use to the end of the backward
    pass, since views of its weights would otherwise become invalid. With block feedback that holds for every layer,
    since each is used once per block. Cells and embeddings are gathered in float32: the state and the residual stream
    are made of them without a product.
    """
    lower = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Layers return views; FSDP warns about changing these in place, which never happens here.
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
    """Make FSDP treat calls of these methods like `forward`; nested calls are part of the outer one."""
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
    """Backward passes in this context accumulate gradients locally; FSDP may keep the gathered weights."""
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
    """Free gathered weights after forward passes without a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()

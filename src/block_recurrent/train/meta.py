"""A training step on meta tensors: counts the work of a GPU, on any machine.

Tensors on the device `meta` have only shapes and dtypes, use the kernels of a GPU (`ops/registry.py`), and reject
every operation that would synchronize with a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from block_recurrent.config import ModelConfig
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.ops.precision import MetaAutocast
from block_recurrent.runtime import Runtime

_PRODUCT_OPS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")
_FREE = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes"),
    *("unsqueeze", "squeeze", "alias", "detach", "as_strided", "unbind", "unfold", "empty", "empty_like", "new_empty"),
    *("empty_strided", "new_empty_strided", "lift_fresh", "_reshape_alias", "chunk", "narrow", "set_", "resize_"),
}
"""Operators that launch no kernel."""
_COPIES = ("_to_copy", "copy_")
_LAUNCHES = {"triton_attention_backward": 3, "triton_rms_backward": 2, "triton_heads_backward": 2}
"""Operators of this package that launch several kernels: a sum over programs is a separate one."""


class Trace(TorchDispatchMode):
    """The work of the device: the number of kernels, the matrix products, and copies that synchronize."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.products: list[tuple[torch.dtype, int]] = []
        """Dtype and FLOPs of each product."""
        self.work: list[tuple[torch.dtype, int, int]] = []
        """For every kernel: dtype and FLOPs of its products, and the bytes that it reads and writes."""
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in tensors + made):
            return out
        if name not in _FREE:
            self.kernels[name] += _LAUNCHES.get(name, 1)
            flops = _attention_flops(name, tensors)
            if name in _PRODUCT_OPS:
                a, b = [x for x in tensors if x.ndim >= 2][-2:]
                flops = 2 * a.numel() * b.shape[-1]
                self.products.append((a.dtype, flops))
            moved = sum(x.numel() * x.element_size() for x in tensors + made)
            self.work.append(((tensors + made)[-1].dtype if not flops else tensors[-1].dtype, flops, moved))
        if func.namespace != "brt" and _synchronizes(name, tensors + made, args, kwargs):
            self.waits.append(str(func))
        return out

    def __enter__(self) -> Any:
        self._made = _MadeFromNumbers(self.waits)
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._made.__exit__(*error)


class _MadeFromNumbers(TorchFunctionMode):
    """Tensors made from Python's numbers on the device: copies that do not reach `__torch_dispatch__`."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_made = func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor)
        by_list = func in (Tensor.__getitem__, Tensor.__setitem__) and any(
            isinstance(index, (list, np.ndarray)) for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if (is_made and out.is_meta) or (by_list and args[0].is_meta):
            self.waits.append(func.__name__)
        return out


def _synchronizes(name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether an operator copies between host and device and waits for that; numbers are arguments of kernels."""
    if name in _COPIES:
        non_blocking = kwargs.get("non_blocking") or args[2:3] == (True,)
        return not non_blocking and len({x.device for x in tensors}) > 1
    return len({x.device for x in tensors if x.is_meta or x.ndim}) > 1


def _attention_flops(name: str, tensors: list[Tensor]) -> int:
    """FLOPs of the fused operators: two products forward, five backward."""
    if name.startswith("triton_attention"):
        q, keys = tensors[0], tensors[3].shape[1]
    elif name.startswith("_scaled_dot_product_flash"):
        backward = name.endswith("backward")
        q, keys = tensors[1 if backward else 0], tensors[2 if backward else 1].shape[2]
    else:
        return 0
    return (10 if name.endswith("backward") else 4) * q.numel() * keys


class SavedBytes:
    """Bytes saved for the backward pass, counting each storage once; parameters are not counted."""

    def __init__(self, model: BlockRecurrentLM) -> None:
        self._storages = {p.untyped_storage()._cdata: 0 for p in model.parameters()}
        self._held: list[Tensor] = []

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.nbytes()
            self._held.append(x)  # otherwise its address could be reused
        return x

    @property
    def total(self) -> int:
        return sum(self._storages.values())


class StepTrace(NamedTuple):
    """The cost of a training step without the update."""

    forward: Trace
    backward: Trace
    saved_bytes: int


class Kept(NamedTuple):
    """Bytes saved for the backward pass of a segment."""

    layers: list[int]
    others: int
    """The loss, and everything outside the layers."""


def saved_bytes(config: ModelConfig, runtime: Runtime, lanes: int = 1) -> Kept:
    """Counted with the kernels that would run: on meta tensors for a GPU, and with data on a CPU."""
    device = runtime.device if runtime.device.type == "cpu" else torch.device("meta")
    with torch.random.fork_rng(devices=[]):
        with torch.device(device):
            model = BlockRecurrentLM(config)
            tokens = torch.zeros(lanes, config.segment, dtype=torch.int64)
        saved, layers = SavedBytes(model), [0] * len(model.layers)
        for number, layer in enumerate(model.layers):

            def count(sign: int, number: int = number) -> None:
                layers[number] += sign * saved.total

            layer.register_forward_pre_hook(lambda *_, count=count: count(-1))
            layer.register_forward_hook(lambda *_, count=count: count(1))
        with saved, replace(runtime, device=device).autocast():
            model.loss(tokens, tokens)
    return Kept(layers, saved.total - sum(layers))


def trace_step(config: ModelConfig, lanes: int = 1, dtype: torch.dtype = torch.bfloat16) -> StepTrace:
    """Loss and backward pass of a segment in the middle of documents, on a GPU with these kernels."""
    with torch.device("meta"):
        model = BlockRecurrentLM(config)
        tokens = torch.empty(lanes, config.segment, dtype=torch.int64)
    with MetaAutocast(dtype):
        memory = model.loss(tokens, tokens).memory.detach()
    forward, backward, saved = Trace(), Trace(), SavedBytes(model)
    with saved, forward, MetaAutocast(dtype):
        loss = model.loss(tokens, tokens, memory)
    with backward:
        loss.sum.backward()
    return StepTrace(forward, backward, saved.total)

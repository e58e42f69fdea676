"""Normalization by the kernel in `norm.c`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from block_recurrent.ops.cpp import (
    POINTER,
    Kernel,
    TensorArgument,
    check,
    once_differentiable,
    pointer,
    tensor,
    tokens_first,
    with_rows,
)


def cpp_norm(x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
    """x (B, H, N, K) * weight (H, K) / sqrt(share * sum(x^2) + epsilon), summed along K, a multiple of 16."""
    return torch.ops.brt.norm(with_rows(x), weight.contiguous(), share, epsilon)


def cpp_unit_heads(heads: Tensor, scales: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """As `norm.unit_heads`. One operator, whose gradients are written next to each other: torch would copy them."""
    weight = scales.view(-1, 1).expand(-1, heads.shape[-1]).contiguous()
    return tuple(torch.ops.brt.unit_heads(with_rows(heads), weight, epsilon))


class _Norm(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((letter, ctypes.c_int) for letter in "BHNK"),
        ("share", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


_forward = Kernel("norm", _Norm, TensorArgument, POINTER, TensorArgument)
_backward = Kernel("norm_backward", _Norm, TensorArgument, POINTER, TensorArgument, TensorArgument, POINTER)


def normalize(x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
    """`cpp_norm` without autograd."""
    check(x.shape[3] % 16 == 0, "rows whose length is not a multiple of 16")
    y, shape = tokens_first(x), tuple(x.shape)
    arguments = _Norm(*shape, share, epsilon, torch.get_num_threads())
    _forward(arguments, tensor(x, shape), pointer(weight, (shape[1], shape[3])), tensor(y, shape))
    return y


def norm_gradients_into(dx: Tensor, x: Tensor, weight: Tensor, dy: Tensor, share: float, epsilon: float) -> Tensor:
    """Write the gradient of x into `dx`, and return that of the weight."""
    check(x.shape[3] % 16 == 0, "rows whose length is not a multiple of 16")
    shape, threads = tuple(x.shape), torch.get_num_threads()
    d_weights = x.new_empty(threads, *weight.shape)
    arguments = _Norm(*shape, share, epsilon, threads)
    inputs = (tensor(x, shape), pointer(weight, (shape[1], shape[3])), tensor(with_rows(dy), shape))
    _backward(arguments, *inputs, tensor(dx, shape), pointer(d_weights, (threads, shape[1], shape[3])))
    return d_weights.sum(0)


torch.library.define("brt::norm", "(Tensor x, Tensor weight, float share, float epsilon) -> Tensor")
torch.library.define(
    "brt::norm_backward", "(Tensor x, Tensor weight, Tensor dy, float share, float epsilon) -> (Tensor, Tensor)"
)
torch.library.impl("brt::norm", "CPU")(normalize)
torch.library.register_fake("brt::norm")(lambda x, *_: tokens_first(x))


@torch.library.impl("brt::norm_backward", "CPU")
def _norm_backward(x: Tensor, weight: Tensor, dy: Tensor, share: float, epsilon: float) -> tuple[Tensor, Tensor]:
    dx = tokens_first(x)
    return dx, norm_gradients_into(dx, x, weight, dy, share, epsilon)


@torch.library.register_fake("brt::norm_backward")
def _norm_backward_room(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.constants = inputs[2:]


def _norm_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.brt.norm_backward(*ctx.saved_tensors, dy, *ctx.constants), None, None


torch.library.register_autograd("brt::norm", _norm_gradients, setup_context=_save)

# The same for several times H heads, of which the first H stay as they are.

torch.library.define("brt::unit_heads", "(Tensor heads, Tensor weight, float epsilon) -> Tensor[]")
torch.library.define(
    "brt::unit_heads_backward", "(Tensor heads, Tensor weight, Tensor[] dy, float epsilon) -> (Tensor, Tensor)"
)


@torch.library.impl("brt::unit_heads", "CPU")
def _unit_heads(heads: Tensor, weight: Tensor, epsilon: float) -> list[Tensor]:
    H = heads.shape[1] - len(weight)
    values = tokens_first(heads[:, :H]).copy_(heads[:, :H])  # an operator must not return a view of its input
    parts = zip(heads[:, H:].split(H, dim=1), weight.split(H), strict=True)
    return [values, *(normalize(x, part, 1.0, epsilon) for x, part in parts)]


@torch.library.register_fake("brt::unit_heads")
def _unit_heads_room(heads: Tensor, weight: Tensor, epsilon: float) -> list[Tensor]:
    H = heads.shape[1] - len(weight)
    return [tokens_first(part) for part in heads.split(H, dim=1)]


@torch.library.impl("brt::unit_heads_backward", "CPU")
def _unit_heads_backward(heads: Tensor, weight: Tensor, dy: list[Tensor], epsilon: float) -> tuple[Tensor, Tensor]:
    H = heads.shape[1] - len(weight)
    d_heads = tokens_first(heads)
    d_values, *d_parts = d_heads.split(H, dim=1)
    d_values.copy_(dy[0])
    parts = zip(d_parts, heads[:, H:].split(H, dim=1), weight.split(H), dy[1:], strict=True)
    return d_heads, torch.cat([norm_gradients_into(*part, 1.0, epsilon) for part in parts])


@torch.library.register_fake("brt::unit_heads_backward")
def _unit_heads_backward_room(heads: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(heads), torch.empty_like(weight)


def _unit_heads_gradients(ctx: Any, dy: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    heads, weight = ctx.saved_tensors
    H = heads.shape[1] - len(weight)
    given = [torch.zeros_like(x) if d is None else d for d, x in zip(dy, heads.split(H, dim=1), strict=True)]
    return *torch.ops.brt.unit_heads_backward(heads, weight, given, *ctx.constants), None


torch.library.register_autograd("brt::unit_heads", _unit_heads_gradients, setup_context=_save)
once_differentiable("brt::norm_backward", "brt::unit_heads_backward")

"""Normalisation by the kernel in `norm.c`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from block_recurrent.nn.native import POINTER, TensorArgument, function, with_rows

FEWEST_ROWS = 64
"""For fewer, the call costs more than it saves."""
MULTIPLE = 16
"""Rows have a multiple of so many numbers."""


def native_norm(x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
    """x (B, H, N, K) * weight (H, K) / sqrt(share * sum(x^2) + epsilon), summed along K."""
    return _NativeNorm.apply(x, weight, share, epsilon)


def native_values_and_units(heads: Tensor, scales: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """As `norm.values_and_units`. The gradients are written side by side: torch would join and copy them."""
    return _NativeValuesAndUnits.apply(heads, scales.view(-1, 1).expand(-1, heads.shape[-1]), epsilon)


class _NativeNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
        x, weight = with_rows(x), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.constants = share, epsilon
        return _normalised(x, weight, share, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx = _tokens_first(x)
        return dx, _backward_into(dx, x, weight, grads[0], *ctx.constants), None, None


class _NativeValuesAndUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        heads, weight = with_rows(heads), weight.contiguous()
        ctx.save_for_backward(heads, weight)
        ctx.epsilon = epsilon
        H = heads.shape[1] - len(weight)
        parts = zip(heads[:, H:].split(H, dim=1), weight.split(H), strict=True)
        return heads[:, :H], *(_normalised(x, part_weight, 1.0, epsilon) for x, part_weight in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        heads, weight = ctx.saved_tensors
        H = heads.shape[1] - len(weight)
        d_heads = _tokens_first(heads)
        d_values, *d_parts = d_heads.split(H, dim=1)
        d_values.copy_(grads[0])
        parts = zip(d_parts, heads[:, H:].split(H, dim=1), weight.split(H), grads[1:], strict=True)
        return d_heads, torch.cat([_backward_into(*part, 1.0, ctx.epsilon) for part in parts]), None


def _tokens_first(like: Tensor) -> Tensor:
    """Room for (B, H, N, K) with the heads of a token side by side, as products with weights have them."""
    B, H, N, K = like.shape
    return like.new_empty(B, N, H, K).transpose(1, 2)


def _normalised(x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
    y = _tokens_first(x)
    shape = _Norm(*x.shape, share, epsilon, torch.get_num_threads())
    _forward()(shape, TensorArgument.of(x), weight.data_ptr(), TensorArgument.of(y))
    return y


def _backward_into(dx: Tensor, x: Tensor, weight: Tensor, dy: Tensor, share: float, epsilon: float) -> Tensor:
    """Writes the gradient of x into `dx`, and returns that of the weight."""
    shape, dy = _Norm(*x.shape, share, epsilon, torch.get_num_threads()), with_rows(dy)
    d_weights = x.new_empty(shape.threads, *weight.shape)
    tensors = (TensorArgument.of(dy), TensorArgument.of(dx), d_weights.data_ptr())
    _backward()(shape, TensorArgument.of(x), weight.data_ptr(), *tensors)
    return d_weights.sum(0)


class _Norm(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((letter, ctypes.c_int) for letter in "BHNK"),
        ("share", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


@functools.cache
def _forward() -> Any:
    return function("norm", _Norm, TensorArgument, POINTER, TensorArgument)


@functools.cache
def _backward() -> Any:
    return function("norm_backward", _Norm, TensorArgument, POINTER, TensorArgument, TensorArgument, POINTER)

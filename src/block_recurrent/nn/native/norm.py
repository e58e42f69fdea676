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


class _NativeNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float, epsilon: float) -> Tensor:
        x, weight = with_rows(x), weight.contiguous()
        B, H, N, K = x.shape
        ctx.shape = _Norm(B, H, N, K, share, epsilon, torch.get_num_threads())
        y = x.new_empty(B, N, H, K).transpose(1, 2)
        _forward()(ctx.shape, TensorArgument.of(x), weight.data_ptr(), TensorArgument.of(y))
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        B, H, N, K = x.shape
        dx, d_weights = x.new_empty(B, N, H, K).transpose(1, 2), x.new_empty(ctx.shape.threads, H, K)
        given, wanted = TensorArgument.of(with_rows(grads[0])), TensorArgument.of(dx)
        _backward()(ctx.shape, TensorArgument.of(x), weight.data_ptr(), given, wanted, d_weights.data_ptr())
        return dx, d_weights.sum(0), None, None


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

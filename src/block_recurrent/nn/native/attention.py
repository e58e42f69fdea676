"""Attention by the kernel in `attention.c`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.nn.native import POINTER, TensorArgument, function, with_rows

FEWEST_QUERIES = 32
"""For fewer, laying out the keys costs more than it saves."""
SIDE = 32
"""So many numbers of minus infinity on both sides of the bias; as in C."""


def native_window_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, fixed_keys: int = 0
) -> Tensor:
    """As `tiles.tiled_window_attention`; the first `fixed_keys` keys and values get no gradient."""
    return _NativeAttention.apply(q, k, v, bias, dropout, 1, fixed_keys)


def native_attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """As `attention.attend`, for (B, H, positions, K)."""
    return _NativeAttention.apply(q, k, v, q.new_zeros(q.shape[1], k.shape[2]), dropout, 0, 0)


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, slide: int, fixed_keys: int
    ) -> Tensor:
        q, k, v = (with_rows(x) for x in (q, k, v))
        B, H, N, K = q.shape
        # The mask is drawn from a seed, and again in the backward pass; torch's generator gives the seed.
        seed = int(torch.randint(2**62, ())) if dropout else 0
        shape = _Shape(B, H, N, K, bias.shape[1], slide, fixed_keys, dropout, seed, torch.get_num_threads())
        bias = F.pad(bias, (SIDE, SIDE), value=float("-inf")).contiguous()
        out = q.new_empty(B, N, H, K).transpose(1, 2)  # heads side by side, as the next product wants them
        log_sums = q.new_empty(B, H, N)
        inputs = map(TensorArgument.of, (q, k, v))
        _forward()(shape, *inputs, bias.data_ptr(), TensorArgument.of(out), log_sums.data_ptr())
        ctx.save_for_backward(q, k, v, bias, out, log_sums)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_sums = ctx.saved_tensors
        B, H, N, K = q.shape
        d_out = with_rows(grads[0])
        dq, dk, dv = q.new_empty(B, N, H, K).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)
        d_bias = q.new_empty(B, *bias.shape)
        inputs, gradients = (map(TensorArgument.of, tensors) for tensors in ((q, k, v), (d_out, dq, dk, dv)))
        result = TensorArgument.of(out), log_sums.data_ptr()
        _backward()(ctx.shape, *inputs, bias.data_ptr(), *result, *gradients, d_bias.data_ptr())
        return dq, dk, dv, d_bias.sum(0)[:, SIDE:-SIDE], None, None, None


class _Shape(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("B", "H", "N", "K", "W", "slide", "fixed_keys")),
        ("dropout", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int),
    )


@functools.cache
def _forward() -> Any:
    return function("attention", _Shape, *3 * [TensorArgument], POINTER, TensorArgument, POINTER)


@functools.cache
def _backward() -> Any:
    arguments = (_Shape, *3 * [TensorArgument], POINTER, TensorArgument, POINTER, *4 * [TensorArgument], POINTER)
    return function("attention_backward", *arguments)

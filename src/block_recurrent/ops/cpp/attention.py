"""Attention by the kernel in `attention.c`: over a sliding window, or over all keys."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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

SIDE = 32
"""So many numbers of minus infinity on both sides of the bias; as in C."""


def cpp_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, *, slide: bool, fixed_keys: int = 0
) -> Tensor:
    """q (B, H, N, K), bias (H, W), k and v (B, H, W + N, K) if the window slides, else (B, H, W, K) -> (B, H, N, K).

    The first `fixed_keys` keys and values get no gradient.
    """
    # The mask is drawn from a seed, and again in the backward pass. A tensor: torch.compile can't look at numbers.
    seed = torch.randint(2**62, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)
    padded = F.pad(bias, (SIDE, SIDE), value=float("-inf")).contiguous()
    return torch.ops.brt.attention(with_rows(q), with_rows(k), with_rows(v), padded, seed, dropout, slide, fixed_keys)[
        0
    ]


class _Shape(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("B", "H", "N", "K", "W", "slide", "fixed_keys")),
        ("dropout", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int),
    )


_forward = Kernel("attention", _Shape, *3 * [TensorArgument], POINTER, TensorArgument, POINTER)
_backward = Kernel(
    "attention_backward",
    *(_Shape, *3 * [TensorArgument], POINTER, TensorArgument, POINTER, *4 * [TensorArgument], POINTER),
)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: Tensor, dropout: float, slide: bool, fixed_keys: int
) -> tuple[Any, ...]:
    """Shape, q, k, v and bias as C wants them."""
    B, H, N, K = q.shape
    W = bias.shape[1] - 2 * SIDE
    keys = (B, H, W + N * slide, K)
    check(N > 0 and W > 0 and 0 <= dropout < 1 and 0 <= fixed_keys <= keys[2], f"N {N}, W {W}, dropout {dropout}")
    shape = _Shape(B, H, N, K, W, slide, fixed_keys, dropout, int(seed), torch.get_num_threads())
    return shape, tensor(q, (B, H, N, K)), tensor(k, keys), tensor(v, keys), pointer(bias, (H, W + 2 * SIDE))


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor seed, float dropout, bool slide, int fixed_keys"
torch.library.define("brt::attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)")
torch.library.define(
    "brt::attention_backward",
    f"({_ARGUMENTS}, Tensor out, Tensor log_sums, Tensor d_out) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("brt::attention")
def _attention_room(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(q), q.new_empty(q.shape[:3])


@torch.library.impl("brt::attention", "CPU")
def _attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, log_sums = _attention_room(q)
    _forward(*_checked(q, *rest), tensor(out, tuple(q.shape)), pointer(log_sums, tuple(q.shape[:3])))
    return out, log_sums


@torch.library.register_fake("brt::attention_backward")
def _backward_room(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = q.new_empty(q.shape[0], *bias.shape)
    return tokens_first(q), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


@torch.library.impl("brt::attention_backward", "CPU")
def _attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, out, log_sums, d_out = arguments
    q, k = inputs[:2]
    dq, dk, dv, d_bias = _backward_room(*inputs)
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    _backward(
        *_checked(*inputs),
        *(tensor(out, q_shape), pointer(log_sums, q_shape[:3]), tensor(d_out, q_shape)),
        *(tensor(dq, q_shape), tensor(dk, k_shape), tensor(dv, k_shape), pointer(d_bias, tuple(d_bias.shape))),
    )
    return dq, dk, dv, d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.constants = inputs[5:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, log_sums = ctx.saved_tensors
    dq, dk, dv, d_bias = torch.ops.brt.attention_backward(*inputs, *ctx.constants, out, log_sums, with_rows(d_out))
    return dq, dk, dv, d_bias.sum(0), None, None, None, None


torch.library.register_autograd("brt::attention", _gradients, setup_context=_save)
once_differentiable("brt::attention_backward")

"""Normalization by the kernels in `norm_kernels.py`, as `torch.library` operators with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from block_recurrent.ops.cpp import once_differentiable, tokens_first, with_rows
from block_recurrent.ops.triton import launching

PROGRAMS = 512
"""Programs of the backward pass of `rms`: four per multiprocessor of a large GPU. Each sums over its rows."""
TOKENS = 16
"""Tokens per program of `unit_heads`."""


def triton_rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """As `norm.rms_norm`, with the result in `dtype`."""
    return torch.ops.brt.triton_rms(x.contiguous(), weight, epsilon, dtype)


def triton_unit_heads(heads: Tensor, scales: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """As `norm.unit_heads`."""
    H = heads.shape[1] - len(scales)
    return torch.ops.brt.triton_unit_heads(with_rows(heads), scales.flatten(), epsilon).split(H, dim=1)


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _warps(width: int) -> int:
    return min(max(_block(width) // 256, 1), 16)


torch.library.define("brt::triton_rms", "(Tensor x, Tensor weight, float epsilon, ScalarType dtype) -> Tensor")
torch.library.define(
    "brt::triton_rms_backward", "(Tensor x, Tensor weight, float epsilon, Tensor dy) -> (Tensor, Tensor)"
)


@torch.library.register_fake("brt::triton_rms")
def _rms_room(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.impl("brt::triton_rms", ("CUDA", "CPU"))
def _rms(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    y, D = _rms_room(x, weight, epsilon, dtype), x.shape[-1]
    with launching(x):
        from block_recurrent.ops.triton import norm_kernels

        rows = x.numel() // D
        norm_kernels.rms[(rows,)](x, weight, y, epsilon, D=D, BLOCK_D=_block(D), num_warps=_warps(D))
    return y


@torch.library.register_fake("brt::triton_rms_backward")
def _rms_backward_room(x: Tensor, weight: Tensor, epsilon: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.impl("brt::triton_rms_backward", ("CUDA", "CPU"))
def _rms_backward(x: Tensor, weight: Tensor, epsilon: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    D = x.shape[-1]
    rows = x.numel() // D
    at_once = -(-rows // PROGRAMS)
    programs = -(-rows // at_once)
    dx, d_weight = torch.empty_like(x), x.new_empty(programs, D, dtype=torch.float32)
    with launching(x):
        from block_recurrent.ops.triton import norm_kernels

        norm_kernels.rms_backward[(programs,)](
            *(x, weight, dy, dx, d_weight, epsilon, rows, at_once), D=D, BLOCK_D=_block(D), num_warps=_warps(D)
        )
    return dx, d_weight.sum(0).to(weight.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.epsilon = inputs[2]


def _rms_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.brt.triton_rms_backward(*ctx.saved_tensors, ctx.epsilon, dy.contiguous()), None, None


torch.library.register_autograd("brt::triton_rms", _rms_gradients, setup_context=_save)

torch.library.define("brt::triton_unit_heads", "(Tensor heads, Tensor scales, float epsilon) -> Tensor")
torch.library.define(
    "brt::triton_unit_heads_backward", "(Tensor heads, Tensor scales, float epsilon, Tensor dy) -> (Tensor, Tensor)"
)
torch.library.register_fake("brt::triton_unit_heads")(lambda heads, *_: tokens_first(heads))


def _launch_heads(kernel: str, pointers: tuple[Tensor, ...], strided: tuple[Tensor, ...], epsilon: float) -> None:
    from block_recurrent.ops.triton import norm_kernels

    heads, scales = pointers[:2]
    B, count, N, K = heads.shape
    grid = (-(-B * N // TOKENS), count)
    strides = (x.stride()[:3] for x in strided)
    getattr(norm_kernels, kernel)[grid](
        *(*pointers, *strides, epsilon, B * N, N, count - len(scales)), TOKENS=TOKENS, K=K, BLOCK_K=_block(K)
    )


@torch.library.impl("brt::triton_unit_heads", ("CUDA", "CPU"))
def _unit_heads(heads: Tensor, scales: Tensor, epsilon: float) -> Tensor:
    y = tokens_first(heads)
    with launching(heads):
        _launch_heads("unit_heads", (heads, scales, y), (heads, y), epsilon)
    return y


@torch.library.register_fake("brt::triton_unit_heads_backward")
def _unit_heads_backward_room(heads: Tensor, scales: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(heads), torch.empty_like(scales)


@torch.library.impl("brt::triton_unit_heads_backward", ("CUDA", "CPU"))
def _unit_heads_backward(heads: Tensor, scales: Tensor, epsilon: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    dx = tokens_first(heads)
    tokens = heads.shape[0] * heads.shape[2]
    d_scales = scales.new_empty(-(-tokens // TOKENS), len(scales), dtype=torch.float32)
    with launching(heads):
        _launch_heads("unit_heads_backward", (heads, scales, dy, dx, d_scales), (heads, dy, dx), epsilon)
    return dx, d_scales.sum(0).to(scales.dtype)


def _unit_heads_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.brt.triton_unit_heads_backward(*ctx.saved_tensors, ctx.epsilon, with_rows(dy)), None


torch.library.register_autograd("brt::triton_unit_heads", _unit_heads_gradients, setup_context=_save)
once_differentiable("brt::triton_rms_backward", "brt::triton_unit_heads_backward")

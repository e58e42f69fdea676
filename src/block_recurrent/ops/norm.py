"""Normalization: root mean square for vectors, unit length for keys and queries. Computed in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.norm import cpp_norm, cpp_unit_heads
from block_recurrent.ops.precision import product_dtype
from block_recurrent.ops.triton.norm import triton_rms_norm, triton_unit_heads

EPSILON = 1e-6
_HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in _HALF else x


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., D) over the root of its mean square along the last axis, times weight (D,).

    In the dtype of x, or in that of the products which read it.
    """
    D = x.shape[-1]
    chosen = registry.select("norm", x, rows=x.numel() // D, width=D)
    if chosen == "cpp":
        return cpp_norm(x.reshape(1, 1, -1, D), weight.view(1, D), 1 / D, EPSILON).view(x.shape)
    if chosen == "triton":
        return triton_rms_norm(x, weight, EPSILON, product_dtype(x))
    return _normalized(x, weight, 1 / D)


def unit_length(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x (B, H, N, K) over its length along the last axis, times a scale (H, 1, 1) per head."""
    return _normalized(x, scale, 1.0)


def unit_heads(heads: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Several times H heads (B, ..., N, K), scales (..., 1, 1) for all but the first H -> those first H as they are,
    then each H of the others at unit length times their scales: values, then keys and queries."""
    H = heads.shape[1] - len(scales)
    chosen = registry.select("norm", heads, rows=heads.shape[2], width=heads.shape[3])
    if chosen == "cpp":
        return cpp_unit_heads(heads, scales, EPSILON)
    if chosen == "triton":
        return triton_unit_heads(heads, scales, EPSILON)
    values, others = heads.split_with_sizes([H, len(scales)], dim=1)
    return values, *unit_length(others, scales).split(H, dim=1)


def _normalized(x: Tensor, factor: Tensor | None, share: float) -> Tensor:
    full = at_least_float32(x)
    unit = full * (share * full.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    return (unit if factor is None else unit * at_least_float32(factor)).to(x.dtype)

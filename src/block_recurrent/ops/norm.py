"""Normalization: root mean square for vectors, unit length for keys and queries. Computed in float32 or better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.norm import cpp_norm, cpp_unit_heads
from block_recurrent.ops.dropout import dropout
from block_recurrent.ops.lanes import slice_lanes
from block_recurrent.ops.precision import product_dtype
from block_recurrent.ops.triton.norm import triton_add_dropout, triton_heads, triton_rms_norm

EPSILON = 1e-6
_HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.float() if x.dtype in _HALF else x


def rms_norm(x: Tensor, weight: Tensor, rate: float = 0.0) -> Tensor:
    """x (..., D) over the root of its mean square along the last axis, times weight (D,); then dropout at a rate.

    In the dtype of x, or in that of the products which read it.
    """
    D = x.shape[-1]
    chosen = registry.select("norm", x, rows=x.numel() // D, width=D)
    if chosen == "triton":
        return triton_rms_norm(x, None, weight, EPSILON, product_dtype(x), rate)[1]
    if chosen == "cpp":
        unit = cpp_norm(x.reshape(1, 1, -1, D), weight.view(1, D).to(x.dtype), 1 / D, EPSILON).view(x.shape)
    else:
        unit = _normalized(x, weight, 1 / D)
    return dropout(unit, rate)


def residual_norm(x: Tensor, weight: Tensor, added: Tensor | None = None, rate: float = 0.0) -> tuple[Tensor, Tensor]:
    """x, or x + added, and `rms_norm` of it: the residual stream, and the input of a branch.

    One operator on GPUs, which also adds the gradients of both.
    """
    D = x.shape[-1]
    if registry.select("norm", x, rows=x.numel() // D, width=D) == "triton":
        return triton_rms_norm(x, added, weight, EPSILON, product_dtype(x), rate)
    x = x if added is None else x + added
    return x, rms_norm(x, weight, rate)


def add_dropout(x: Tensor, added: Tensor, rate: float) -> Tensor:
    """x + added, this one with dropout at a rate."""
    D = x.shape[-1]
    if rate and registry.select("norm", x, rows=x.numel() // D, width=D) == "triton":
        return triton_add_dropout(x, added, rate)
    return x + dropout(added, rate)


def unit_length(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x (B, H, N, K) over its length along the last axis, times a scale (H, 1, 1) per head."""
    return _normalized(x, scale, 1.0)


class TokenHeads(NamedTuple):
    """Heads of the tokens of a call, (B, H, N, K). Keys and values come after the cached ones: (B, H, C + N, K)."""

    values: Tensor
    keys: Tensor
    queries: Tensor
    state_queries: Tensor | None
    next_values: Tensor
    """The last C of each lane."""
    next_keys: Tensor


def unit_heads(heads: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Several times H heads (B, ..., N, K), scales (..., 1, 1) for all but the first H -> those first H as they are,
    then each H of the others at unit length times their scales: values, then keys and queries."""
    H = heads.shape[1] - len(scales)
    chosen = registry.select("norm", heads, rows=heads.shape[2], width=heads.shape[3])
    if chosen == "cpp":
        return cpp_unit_heads(heads, scales, EPSILON)
    if chosen == "triton":
        return triton_heads(heads, scales, None, None, EPSILON)[: heads.shape[1] // H]
    values, others = heads.split_with_sizes([H, len(scales)], dim=1)
    return values, *unit_length(others, scales).split(H, dim=1)


def token_heads(heads: Tensor, scales: Tensor, values: Tensor, keys: Tensor, lengths: Sequence[int]) -> TokenHeads:
    """`unit_heads` of tokens, after the cached values and keys (B, H, C, K) of those before them.

    lengths: how many tokens are real in each lane. The cached ones are cast to the dtype of the heads.
    """
    C, N = keys.shape[2], heads.shape[2]
    chosen = registry.select("norm", heads, rows=N, width=heads.shape[3])
    if chosen == "triton" and min(lengths) == N:
        values, keys, queries, others, *newest = triton_heads(heads, scales, values, keys, EPSILON)
        return TokenHeads(values, keys, queries, others if others.numel() else None, *newest)
    new_values, new_keys, queries, *rest = unit_heads(heads, scales)
    values = torch.cat([values.to(heads.dtype), new_values], dim=2)
    keys = torch.cat([keys.to(heads.dtype), new_keys], dim=2)
    newest = [slice_lanes(x, lengths, C, dim=2) for x in (values, keys)]
    return TokenHeads(values, keys, queries, rest[0] if rest else None, *newest)


def _normalized(x: Tensor, factor: Tensor | None, share: float) -> Tensor:
    full = at_least_float32(x)
    unit = full * (share * full.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    return (unit if factor is None else unit * at_least_float32(factor)).to(x.dtype)

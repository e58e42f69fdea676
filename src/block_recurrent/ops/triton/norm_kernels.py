"""Normalization kernels in Triton: rows at a mean square of one, and heads at unit length.

Sums over rows are computed per program, and then over programs in a fixed order: results are reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms(x_pointer, weight_pointer, y_pointer, epsilon, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row of a matrix (rows, D) for each program."""
    columns = tl.arange(0, BLOCK_D)
    places = tl.program_id(0).to(tl.int64) * D + columns
    x = tl.load(x_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
    weight = tl.load(weight_pointer + columns, mask=columns < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / D + epsilon) * weight
    tl.store(y_pointer + places, y.to(y_pointer.dtype.element_ty), mask=columns < D)


@triton.jit
def rms_backward(
    x_pointer, weight_pointer, dy_pointer, dx_pointer, d_weight_pointer, epsilon, rows, rows_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some rows for each program, and its share of the weight's gradient, d_weight (programs, D)."""
    columns = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_pointer + columns, mask=columns < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK_D], tl.float32)
    first = tl.program_id(0) * rows_at_once
    for row in range(first, tl.minimum(first + rows_at_once, rows)):
        places = tl.to_tensor(row).to(tl.int64) * D + columns
        x = tl.load(x_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
        dy = tl.load(dy_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x) / D + epsilon)
        d_unit = dy * weight
        dx = inverse * (d_unit - x * (tl.sum(d_unit * x) * inverse * inverse / D))
        tl.store(dx_pointer + places, dx.to(dx_pointer.dtype.element_ty), mask=columns < D)
        d_weight += dy * x * inverse
    tl.store(d_weight_pointer + tl.program_id(0) * D + columns, d_weight, mask=columns < D)


@triton.jit
def _head(strides, tokens, N, head, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the numbers of one head of some tokens are in a tensor (B, heads, N, K)."""
    lane, row = (tokens // N).to(tl.int64), (tokens % N).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    return (lane * strides[0] + head * strides[1] + row * strides[2])[:, None] + columns[None, :]


@triton.jit
def unit_heads(
    x_pointer, scales_pointer, y_pointer, x_strides, y_strides, epsilon, tokens, N, unscaled,
    TOKENS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One head of some tokens for each program; the first `unscaled` heads stay as they are."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    there = (token < tokens)[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    x = tl.load(x_pointer + _head(x_strides, token, N, head, K, BLOCK_K), mask=there, other=0.0).to(tl.float32)
    if head >= unscaled:
        scale = tl.load(scales_pointer + head - unscaled).to(tl.float32)
        x = x * (tl.rsqrt(tl.sum(x * x, 1) + epsilon) * scale)[:, None]
    tl.store(y_pointer + _head(y_strides, token, N, head, K, BLOCK_K), x.to(y_pointer.dtype.element_ty), mask=there)


@triton.jit
def unit_heads_backward(
    x_pointer, scales_pointer, dy_pointer, dx_pointer, d_scales_pointer, x_strides, dy_strides, dx_strides, epsilon,
    tokens, N, unscaled, TOKENS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of the same, and each program's share of its scale's gradient, d_scales (programs, scaled heads)."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    there = (token < tokens)[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    dy = tl.load(dy_pointer + _head(dy_strides, token, N, head, K, BLOCK_K), mask=there, other=0.0).to(tl.float32)
    if head >= unscaled:
        x = tl.load(x_pointer + _head(x_strides, token, N, head, K, BLOCK_K), mask=there, other=0.0).to(tl.float32)
        scale = tl.load(scales_pointer + head - unscaled).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) + epsilon)
        along = tl.sum(dy * x, 1)
        scaled = tl.num_programs(1) - unscaled
        tl.store(d_scales_pointer + tl.program_id(0) * scaled + head - unscaled, tl.sum(along * inverse))
        dy = (dy - x * (along * inverse * inverse)[:, None]) * (inverse * scale)[:, None]
    tl.store(dx_pointer + _head(dx_strides, token, N, head, K, BLOCK_K), dy.to(dx_pointer.dtype.element_ty), mask=there)

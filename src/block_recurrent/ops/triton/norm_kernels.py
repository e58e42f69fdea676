"""Normalization kernels in Triton: rows at a mean square of one, and heads at unit length after cached ones.

Sums over rows are computed per program, and then over programs in a fixed order: results are reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from block_recurrent.ops.triton.random_kernels import kept, row_words


@triton.jit(do_not_specialize=["seed"])
def rms(
    x_pointer, added_pointer, weight_pointer, sum_pointer, y_pointer, seed, epsilon, dropped, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADDED: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """A row of a matrix (rows, D) for each program, or with ADDED of the sum of two; the row itself is written too."""
    columns = tl.arange(0, BLOCK_D)
    row = tl.program_id(0)
    places = row.to(tl.int64) * D + columns
    x = tl.load(x_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(sum_pointer + places, x.to(sum_pointer.dtype.element_ty), mask=columns < D)
    weight = tl.load(weight_pointer + columns, mask=columns < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / D + epsilon) * weight
    if DROPOUT:
        first, second = row_words(seed, 0, row)
        y = tl.where(kept(first, second, columns, dropped), y * keep_scale, 0.0)
    tl.store(y_pointer + places, y.to(y_pointer.dtype.element_ty), mask=columns < D)


@triton.jit(do_not_specialize=["seed"])
def rms_backward(
    x_pointer, weight_pointer, dy_pointer, d_sum_pointer, dx_pointer, d_added_pointer, d_weight_pointer,
    seed, epsilon, dropped, keep_scale, rows, rows_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SUM: tl.constexpr, ADDED: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Some rows for each program, and its share of the weight's gradient, d_weight (programs, D).

    With SUM, the rows themselves have a gradient beside that of their norm; with ADDED, it is written twice.
    """
    columns = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_pointer + columns, mask=columns < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK_D], tl.float32)
    start = tl.program_id(0) * rows_at_once
    for row in range(start, tl.minimum(start + rows_at_once, rows)):
        places = tl.to_tensor(row).to(tl.int64) * D + columns
        x = tl.load(x_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
        dy = tl.load(dy_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
        if DROPOUT:
            first, second = row_words(seed, 0, tl.to_tensor(row))
            dy = tl.where(kept(first, second, columns, dropped), dy * keep_scale, 0.0)
        inverse = tl.rsqrt(tl.sum(x * x) / D + epsilon)
        d_unit = dy * weight
        dx = inverse * (d_unit - x * (tl.sum(d_unit * x) * inverse * inverse / D))
        if SUM:
            dx += tl.load(d_sum_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
        tl.store(dx_pointer + places, dx.to(dx_pointer.dtype.element_ty), mask=columns < D)
        if ADDED:
            tl.store(d_added_pointer + places, dx.to(d_added_pointer.dtype.element_ty), mask=columns < D)
        d_weight += dy * x * inverse
    tl.store(d_weight_pointer + tl.program_id(0) * D + columns, d_weight, mask=columns < D)


@triton.jit(do_not_specialize=["seed"])
def add_dropout(
    x_pointer, added_pointer, out_pointer, seed, dropped, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A row of a matrix (rows, D) for each program: dropout of one, added to the other if ADD."""
    columns = tl.arange(0, BLOCK_D)
    row = tl.program_id(0)
    places = row.to(tl.int64) * D + columns
    added = tl.load(added_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
    first, second = row_words(seed, 0, row)
    out = tl.where(kept(first, second, columns, dropped), added * keep_scale, 0.0)
    if ADD:
        out += tl.load(x_pointer + places, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(out_pointer + places, out.to(out_pointer.dtype.element_ty), mask=columns < D)


@triton.jit
def _head(strides, lane, head, row, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the numbers of one head of some rows are in a tensor (B, heads, rows, K)."""
    columns = tl.arange(0, BLOCK_K)
    return (lane * strides[0] + head.to(tl.int64) * strides[1] + row * strides[2])[:, None] + columns[None, :]


@triton.jit
def _move(
    pointer, strides, cached_pointer, cached_strides, next_pointer, next_strides, x, lane, head, row, there, C, N,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the cached rows, x after them, and the last C rows of both as the next cache."""
    old = there & (row < C)[:, None]
    cached = tl.load(cached_pointer + _head(cached_strides, lane, head, row, K, BLOCK_K), mask=old, other=0.0)
    x = tl.where((row < C)[:, None], cached.to(tl.float32), x)
    tl.store(pointer + _head(strides, lane, head, row, K, BLOCK_K), x.to(pointer.dtype.element_ty), mask=there)
    newest = there & (row >= N)[:, None]
    place = next_pointer + _head(next_strides, lane, head, row - N, K, BLOCK_K)
    tl.store(place, x.to(next_pointer.dtype.element_ty), mask=newest)


@triton.jit
def heads(
    x_pointer, scales_pointer, old_values_pointer, old_keys_pointer,
    values_pointer, keys_pointer, queries_pointer, others_pointer, next_values_pointer, next_keys_pointer,
    inverses_pointer, x_strides, old_values_strides, old_keys_strides, values_strides, keys_strides, queries_strides,
    others_strides, next_values_strides, next_keys_strides, epsilon, rows, C, N, H,
    ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One head of some rows for each program, of the C cached ones and the N of x; `rows`: of all lanes together.

    inverses (B, scaled heads, N): one over the lengths.
    """
    at, number = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    lane, row = (at // (C + N)).to(tl.int64), (at % (C + N)).to(tl.int64)
    group, head = number // H, number % H
    there = (at < rows)[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    new = there & (row >= C)[:, None]
    x = tl.load(x_pointer + _head(x_strides, lane, number, row - C, K, BLOCK_K), mask=new, other=0.0).to(tl.float32)
    if group > 0:
        scale = tl.load(scales_pointer + number - H).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) + epsilon)
        place = inverses_pointer + (lane * (tl.num_programs(1) - H) + number - H) * N + row - C
        tl.store(place, inverse, mask=(at < rows) & (row >= C))
        x = x * (inverse * scale)[:, None]
    if group == 0:
        _move(
            values_pointer, values_strides, old_values_pointer, old_values_strides, next_values_pointer,
            next_values_strides, x, lane, head, row, there, C, N, K, BLOCK_K,
        )  # fmt: skip
    elif group == 1:
        _move(
            keys_pointer, keys_strides, old_keys_pointer, old_keys_strides, next_keys_pointer,
            next_keys_strides, x, lane, head, row, there, C, N, K, BLOCK_K,
        )  # fmt: skip
    elif group == 2:
        place = queries_pointer + _head(queries_strides, lane, head, row - C, K, BLOCK_K)
        tl.store(place, x.to(queries_pointer.dtype.element_ty), mask=new)
    else:
        place = others_pointer + _head(others_strides, lane, head, row - C, K, BLOCK_K)
        tl.store(place, x.to(others_pointer.dtype.element_ty), mask=new)


@triton.jit
def _gradient(
    d_pointer, d_strides, d_next_pointer, d_next_strides, d_old_pointer, d_old_strides, lane, head, row, there, C, N,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NEXT: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """The gradient of rows from both of their copies; that of the cached rows is written."""
    dy = tl.load(d_pointer + _head(d_strides, lane, head, row, K, BLOCK_K), mask=there, other=0.0).to(tl.float32)
    if NEXT:
        newest = there & (row >= N)[:, None]
        place = d_next_pointer + _head(d_next_strides, lane, head, row - N, K, BLOCK_K)
        dy += tl.load(place, mask=newest, other=0.0).to(tl.float32)
    if OLD:
        place = d_old_pointer + _head(d_old_strides, lane, head, row, K, BLOCK_K)
        tl.store(place, dy.to(d_old_pointer.dtype.element_ty), mask=there & (row < C)[:, None])
    return dy


@triton.jit
def heads_backward(
    keys_pointer, queries_pointer, others_pointer, scales_pointer, inverses_pointer,
    d_values_pointer, d_keys_pointer, d_queries_pointer, d_others_pointer,
    d_next_values_pointer, d_next_keys_pointer, dx_pointer, d_scales_pointer, d_old_values_pointer, d_old_keys_pointer,
    keys_strides, queries_strides, others_strides, d_values_strides, d_keys_strides, d_queries_strides,
    d_others_strides, d_next_values_strides, d_next_keys_strides, dx_strides, d_old_values_strides, d_old_keys_strides,
    rows, C, N, H,
    ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, NEXT: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """Gradients of the same, and each program's share of its scale's gradient, d_scales (programs, scaled heads).

    From the results, which others keep too: over their scale they have unit length.
    """
    at, number = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    lane, row = (at // (C + N)).to(tl.int64), (at % (C + N)).to(tl.int64)
    group, head = number // H, number % H
    there = (at < rows)[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    new = there & (row >= C)[:, None]
    result = keys_pointer + _head(keys_strides, lane, head, row, K, BLOCK_K)
    if group == 0:
        dy = _gradient(
            d_values_pointer, d_values_strides, d_next_values_pointer, d_next_values_strides, d_old_values_pointer,
            d_old_values_strides, lane, head, row, there, C, N, K, BLOCK_K, NEXT, OLD,
        )  # fmt: skip
    elif group == 1:
        dy = _gradient(
            d_keys_pointer, d_keys_strides, d_next_keys_pointer, d_next_keys_strides, d_old_keys_pointer,
            d_old_keys_strides, lane, head, row, there, C, N, K, BLOCK_K, NEXT, OLD,
        )  # fmt: skip
    elif group == 2:
        place = d_queries_pointer + _head(d_queries_strides, lane, head, row - C, K, BLOCK_K)
        dy = tl.load(place, mask=new, other=0.0).to(tl.float32)
        result = queries_pointer + _head(queries_strides, lane, head, row - C, K, BLOCK_K)
    else:
        place = d_others_pointer + _head(d_others_strides, lane, head, row - C, K, BLOCK_K)
        dy = tl.load(place, mask=new, other=0.0).to(tl.float32)
        result = others_pointer + _head(others_strides, lane, head, row - C, K, BLOCK_K)
    if group > 0:
        scaled = tl.num_programs(1) - H
        scale = tl.load(scales_pointer + number - H).to(tl.float32)
        place = inverses_pointer + (lane * scaled + number - H) * N + row - C
        inverse = tl.load(place, mask=(at < rows) & (row >= C), other=0.0)
        unit = tl.load(result, mask=new, other=0.0).to(tl.float32) / tl.where(scale == 0, 1.0, scale)
        along = tl.sum(dy * unit, 1)
        tl.store(d_scales_pointer + tl.program_id(0) * scaled + number - H, tl.sum(along))
        dy = (dy - unit * along[:, None]) * (inverse * scale)[:, None]
    place = dx_pointer + _head(dx_strides, lane, number, row - C, K, BLOCK_K)
    tl.store(place, dy.to(dx_pointer.dtype.element_ty), mask=new)

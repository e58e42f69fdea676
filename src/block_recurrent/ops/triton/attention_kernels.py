"""The kernels of window attention in Triton: forward, gradient of queries and bias, gradient of keys and values.

Query i sees the keys i to i + W - 1, of W + N. Logits are kept in units of log 2, since the hardware has `exp2`.
Nothing is added atomically, so the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from block_recurrent.ops.triton.random_kernels import kept, row_words

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _place(tiles, H):
    """Tile, head of all lanes, lane and head of a program: one dimension of the grid, as others end at 65,535."""
    pair = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, pair, pair // H, pair % H


@triton.jit
def _rows(pointer, strides, lane, head, start, count, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Addresses of ROWS rows from `start` on of one head of a tensor (B, H, count, K), and which of them there are."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    # Far in 64 bits, near in 32: addresses of 64 bits for every number would take twice the registers.
    base = pointer + lane.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    base += tl.to_tensor(start).to(tl.int64) * strides[2]
    there = (start + rows < count)[:, None] & (columns < K)[None, :]
    return base + (rows[:, None] * strides[2] + columns[None, :]), there


@triton.jit
def _load(pointer, strides, lane, head, start, count, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Those rows, zeros where there are none: (ROWS, BLOCK_K)."""
    addresses, there = _rows(pointer, strides, lane, head, start, count, ROWS, K, BLOCK_K)
    return tl.load(addresses, mask=there, other=0.0)


@triton.jit
def _store(pointer, strides, lane, head, start, count, x, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    addresses, there = _rows(pointer, strides, lane, head, start, count, ROWS, K, BLOCK_K)
    tl.store(addresses, x.to(pointer.dtype.element_ty), mask=there)


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr):
    """A product, added to `sums` if there are any."""
    if PRECISION == "interpreted":  # where numbers of bfloat16 would be multiplied as if they were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _logits(products, bias_pointer, head, distances, W: tl.constexpr):
    """Products and bias, in units of log 2; minus infinity outside of the window."""
    seen = (distances >= 0) & (distances < W)
    bias = tl.load(bias_pointer + head * W + distances, mask=seen, other=0.0)
    return tl.where(seen, (products + bias) * LOG2_E, MINUS_INFINITY)


@triton.jit
def _logit_gradients(weights, d_weights, deltas, W: tl.constexpr):
    """Nothing where a query sees one key: its weight is 1 whatever the logit, and the difference is rounding."""
    if W == 1:
        return tl.zeros_like(weights)
    return weights * (d_weights - deltas)


@triton.jit(do_not_specialize=["seed"])
def forward(
    q_pointer, k_pointer, v_pointer, bias_pointer, seed, out_pointer, log_sums_pointer,
    q_strides, k_strides, v_strides, out_strides, H, N, dropped, keep_scale,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program has a tile of queries, and goes over the keys that they see."""
    tile, pair, lane, head = _place(tl.cdiv(N, QUERIES), H)
    start = tile * QUERIES
    rows = start + tl.arange(0, QUERIES)
    q = _load(q_pointer, q_strides, lane, head, start, N, QUERIES, K, BLOCK_K)
    largest = tl.full([QUERIES], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, BLOCK_K], tl.float32)
    if DROPOUT:
        first, second = row_words(seed, pair, rows)
    for ahead in range(0, QUERIES + W - 1, KEYS):
        columns = start + ahead + tl.arange(0, KEYS)
        k = _load(k_pointer, k_strides, lane, head, start + ahead, N + W, KEYS, K, BLOCK_K)
        distances = columns[None, :] - rows[:, None]
        logits = _logits(_dot(q, tl.trans(k), None, PRECISION), bias_pointer, head, distances, W)
        now = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(now == MINUS_INFINITY, 0.0, now)  # a query may see none of the keys so far
        weights = tl.exp2(logits - shift[:, None])
        old = tl.exp2(largest - shift)
        sums = sums * old + tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(kept(first[:, None], second[:, None], distances, dropped), weights, 0.0)
        v = _load(v_pointer, v_strides, lane, head, start + ahead, N + W, KEYS, K, BLOCK_K)
        out = _dot(weights.to(v.dtype), v, out * old[:, None], PRECISION)
        largest = now
    out = out * (keep_scale / sums)[:, None]
    _store(out_pointer, out_strides, lane, head, start, N, out, QUERIES, K, BLOCK_K)
    tl.store(log_sums_pointer + pair.to(tl.int64) * N + rows, largest + tl.log2(sums), mask=rows < N)


@triton.jit(do_not_specialize=["seed"])
def queries_backward(
    q_pointer, k_pointer, v_pointer, bias_pointer, seed, out_pointer, log_sums_pointer, d_out_pointer,
    dq_pointer, d_bias_pointer, deltas_pointer,
    q_strides, k_strides, v_strides, out_strides, d_out_strides, dq_strides, H, N, dropped, keep_scale,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and its share of the bias' gradient, d_bias (B, H, tiles, W).

    The gradient of the bias is a sum along diagonals. A tile of logits is sheared: row i moves i places to the left,
    and what leaves on the left comes in again on the right. A column then holds a diagonal of this tile of keys, and
    below it one of the tile before: those of the one before are complete when this one is done.
    """
    tiles = tl.cdiv(N, TILE)
    tile, pair, lane, head = _place(tiles, H)
    start = tile * TILE
    within = tl.arange(0, TILE)
    rows = start + within
    q = _load(q_pointer, q_strides, lane, head, start, N, TILE, K, BLOCK_K)
    d_out = _load(d_out_pointer, d_out_strides, lane, head, start, N, TILE, K, BLOCK_K)
    out = _load(out_pointer, out_strides, lane, head, start, N, TILE, K, BLOCK_K)
    deltas = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    places = pair.to(tl.int64) * N + rows
    tl.store(deltas_pointer + places, deltas, mask=rows < N)
    log_sums = tl.load(log_sums_pointer + places, mask=rows < N, other=0.0)
    dq = tl.zeros([TILE, BLOCK_K], tl.float32)
    diagonals = tl.zeros([TILE], tl.float32)
    d_bias_row = d_bias_pointer + (pair.to(tl.int64) * tiles + tile) * W
    sheared_columns = (within[:, None] + within[None, :]) % TILE
    is_own = within[:, None] + within[None, :] < TILE
    if DROPOUT:
        first, second = row_words(seed, pair, rows)
    for ahead in range(0, TILE + W - 1, TILE):
        columns = start + ahead + within
        k = _load(k_pointer, k_strides, lane, head, start + ahead, N + W, TILE, K, BLOCK_K)
        distances = columns[None, :] - rows[:, None]
        logits = _logits(_dot(q, tl.trans(k), None, PRECISION), bias_pointer, head, distances, W)
        weights = tl.exp2(logits - log_sums[:, None])
        v = _load(v_pointer, v_strides, lane, head, start + ahead, N + W, TILE, K, BLOCK_K)
        d_weights = _dot(d_out, tl.trans(v), None, PRECISION)
        if DROPOUT:
            stay = kept(first[:, None], second[:, None], distances, dropped)
            d_weights = tl.where(stay, d_weights * keep_scale, 0.0)
        d_logits = tl.where((rows < N)[:, None], _logit_gradients(weights, d_weights, deltas[:, None], W), 0.0)
        dq = _dot(d_logits.to(k.dtype), k, dq, PRECISION)
        sheared = tl.gather(d_logits, sheared_columns, 1)
        own = tl.sum(tl.where(is_own, sheared, 0.0), 0)
        distance = ahead - TILE + within
        complete = diagonals + tl.sum(tl.where(is_own, 0.0, sheared), 0)
        tl.store(d_bias_row + distance, complete, mask=(distance >= 0) & (distance < W))
        diagonals = own
    last = tl.cdiv(TILE + W - 1, TILE) * TILE - TILE + within
    tl.store(d_bias_row + last, diagonals, mask=last < W)
    _store(dq_pointer, dq_strides, lane, head, start, N, dq, TILE, K, BLOCK_K)


@triton.jit(do_not_specialize=["seed"])
def keys_backward(
    q_pointer, k_pointer, v_pointer, bias_pointer, seed, log_sums_pointer, d_out_pointer, deltas_pointer,
    dk_pointer, dv_pointer,
    q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides, H, N, fixed_keys, dropped, keep_scale,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, over the queries that see them; zeros for those that are fixed."""
    tile, pair, lane, head = _place(tl.cdiv(N + W, KEYS), H)
    start = tile * KEYS
    columns = start + tl.arange(0, KEYS)
    k = _load(k_pointer, k_strides, lane, head, start, N + W, KEYS, K, BLOCK_K)
    v = _load(v_pointer, v_strides, lane, head, start, N + W, KEYS, K, BLOCK_K)
    dk = tl.zeros([KEYS, BLOCK_K], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_K], tl.float32)
    end = tl.where(start + KEYS <= fixed_keys, 0, tl.minimum(N, start + KEYS))
    for at in range(tl.maximum(0, start - W + 1), end, QUERIES):
        rows = at + tl.arange(0, QUERIES)
        q = _load(q_pointer, q_strides, lane, head, at, N, QUERIES, K, BLOCK_K)
        d_out = _load(d_out_pointer, d_out_strides, lane, head, at, N, QUERIES, K, BLOCK_K)
        places = pair.to(tl.int64) * N + rows
        log_sums = tl.load(log_sums_pointer + places, mask=rows < N, other=float("inf"))
        deltas = tl.load(deltas_pointer + places, mask=rows < N, other=0.0)
        distances = columns[:, None] - rows[None, :]
        logits = _logits(_dot(k, tl.trans(q), None, PRECISION), bias_pointer, head, distances, W)
        weights = tl.exp2(logits - log_sums[None, :])
        d_weights = _dot(v, tl.trans(d_out), None, PRECISION)
        dropped_weights = weights
        if DROPOUT:
            first, second = row_words(seed, pair, rows)
            stay = kept(first[None, :], second[None, :], distances, dropped)
            dropped_weights = tl.where(stay, weights * keep_scale, 0.0)
            d_weights = tl.where(stay, d_weights * keep_scale, 0.0)
        dv = _dot(dropped_weights.to(d_out.dtype), d_out, dv, PRECISION)
        d_logits = _logit_gradients(weights, d_weights, deltas[None, :], W)
        dk = _dot(d_logits.to(q.dtype), q, dk, PRECISION)
    moves = (columns >= fixed_keys)[:, None]
    _store(dk_pointer, dk_strides, lane, head, start, N + W, tl.where(moves, dk, 0.0), KEYS, K, BLOCK_K)
    _store(dv_pointer, dv_strides, lane, head, start, N + W, tl.where(moves, dv, 0.0), KEYS, K, BLOCK_K)

"""Sliding-window attention in narrow tiles, with a backward pass of its own: the fast path on a CPU.

A tile of w queries sees a band of w + W keys, so narrow tiles waste little on keys outside of the window: with w = W/8,
one eighth, where the W x 2W tile of the paper wastes half. A tile's logits and weights stay in the cache between the
products; the backward pass makes them again instead of keeping them, which costs one product in six and saves the
largest tensors of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.nn.dropout import keep_mask, scaled_mask

TILE_WIDTH = 64
"""Queries of a tile. Wider wastes more, narrower makes the products too small (docs/performance.md)."""
NUMBERS_AT_ONCE = 2**20
"""Logits of one step over several lanes: 4 MiB, what the second-level cache of two cores holds."""


class _Tile(NamedTuple):
    """One step: these lanes (times heads), these queries, this band of keys."""

    lanes: slice
    queries: slice
    band: slice


def tiled_window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """As `attention.window_attention`, for at least one query."""
    return _TiledWindowAttention.apply(q, k, v, bias, dropout)


class _TiledWindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
        H, N, W = q.shape[1], q.shape[2], bias.shape[1]
        width = min(TILE_WIDTH, N)
        by_query_and_key = spread_over_tile(bias, width)
        q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
        out = torch.empty_like(q3)
        kept = []
        for tile in _tiles(len(q), H, N, W, width):
            weights = _weights(q3, k3, by_query_and_key, tile)
            if dropout:
                kept.append(keep_mask(weights, dropout))
                weights.mul_(scaled_mask(kept[-1], dropout, weights.dtype))
            # Copied into place: torch has no batched product into a part of a tensor, only one matrix after the other.
            out[tile.lanes, tile.queries] = torch.bmm(weights, v3[tile.lanes, tile.band])
        ctx.save_for_backward(q, k, v, bias)
        ctx.kept, ctx.dropout = kept, dropout
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, bias = ctx.saved_tensors
        H, N, W = q.shape[1], q.shape[2], bias.shape[1]
        width = min(TILE_WIDTH, N)
        by_query_and_key = spread_over_tile(bias, width)
        q3, k3, v3, d_out = (x.flatten(0, 1) for x in (q, k, v, grads[0]))
        dq, dk, dv = torch.empty_like(q3), torch.zeros_like(k3), torch.zeros_like(v3)
        d_bias = torch.zeros_like(by_query_and_key)
        for number, (lanes, queries, band) in enumerate(tiles := list(_tiles(len(q), H, N, W, width))):
            weights = _weights(q3, k3, by_query_and_key, tiles[number])
            d_weights = torch.bmm(d_out[lanes, queries], v3[lanes, band].transpose(1, 2))
            dropped = weights
            if ctx.dropout:
                mask = scaled_mask(ctx.kept[number], ctx.dropout, weights.dtype)
                dropped = weights * mask
                d_weights.mul_(mask)
            dv[lanes, band] += torch.bmm(dropped.transpose(1, 2), d_out[lanes, queries])
            d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            dq[lanes, queries] = torch.bmm(d_logits, k3[lanes, band])
            dk[lanes, band] += torch.bmm(d_logits.transpose(1, 2), q3[lanes, queries])
            n, L = d_logits.shape[1:]
            d_bias[:, :n, :L] += d_logits.view(-1, H, n, L).sum(0) if len(d_logits) > H else d_logits
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), gather_from_tile(d_bias, W), None


def _tiles(lanes: int, H: int, N: int, W: int, width: int) -> Iterator[_Tile]:
    lanes_at_once = max(1, NUMBERS_AT_ONCE // (H * width * (width + W)))
    for lane in range(0, lanes, lanes_at_once):
        for query in range(0, N, width):
            end = min(query + width, N)
            yield _Tile(slice(lane * H, (lane + lanes_at_once) * H), slice(query, end), slice(query, end + W))


def _weights(q3: Tensor, k3: Tensor, by_query_and_key: Tensor, tile: _Tile) -> Tensor:
    """The attention weights of a tile, (lanes * H, w, w + W)."""
    q, k = q3[tile.lanes, tile.queries], k3[tile.lanes, tile.band]
    H, n, L = len(by_query_and_key), q.shape[1], k.shape[1]
    logits = q.new_empty(len(q), n, L)
    logits.view(-1, H, n, L).copy_(by_query_and_key[:, :n, :L])
    logits.baddbmm_(q, k.transpose(1, 2))  # adds to what is there
    return torch.softmax(logits, -1, out=logits)


def spread_over_tile(bias: Tensor, width: int) -> Tensor:
    """(H, W), oldest key first -> (H, w, w + W) by query and key; minus infinity where a query may not look.

    Query i sees the keys i to i + W - 1 of its tile: every row is the row above, one place further to the right. Upside
    down, such rows overlap in one padded list, and the tile is a view of it.
    """
    padded = F.pad(bias, (width - 1, width), value=float("-inf"))
    return padded.unfold(1, width + bias.shape[1], 1).flip(1)


def gather_from_tile(tile: Tensor, window: int) -> Tensor:
    """The gradient of `spread_over_tile`: sums along the diagonals, (H, w, w + W) -> (H, W)."""
    _, width, L = tile.shape
    # Reading rows that are one number longer than they are shifts row i to the left by i: diagonals become columns.
    sheared = F.pad(tile.flatten(1), (0, width)).unflatten(1, (width, L + 1))
    return sheared[..., :window].sum(1)

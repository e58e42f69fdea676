"""Sliding-window attention in narrow tiles, with a custom backward pass: the fast path on a CPU.

A tile of w queries sees a band of w + W keys, so narrow tiles waste little on keys outside the window: with w = W/8,
one eighth, where the W x 2W tile of the paper wastes half. A tile's logits and weights stay in the cache between the
products; the backward pass recomputes them instead of storing them, which costs one product in six and saves the
largest tensors of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops.dropout import keep_mask, scaled_mask
from block_recurrent.ops.once import once_differentiable

TILE_WIDTH = 64
"""Queries of a tile. Wider wastes more, narrower makes the products too small (docs/performance.md)."""
NUMBERS_AT_ONCE = 2**20
"""Logits of one step over several lanes: 4 MiB, what the second-level cache of two cores holds."""


def tiled_window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """As `attention.window_attention`, for at least one query."""
    return _TiledWindowAttention.apply(q, k, v, bias, dropout)


class _TiledWindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
        B, H, N, K = q.shape
        by_query_and_key = spread_over_tile(bias, min(TILE_WIDTH, N))
        q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
        out = q.new_empty(B, N, H, K).transpose(1, 2)  # heads next to each other, as the next product needs them
        kept = []
        for run in _runs(q.shape, bias.shape[1]):
            weights = run.buffer(q)
            for q_tile, k_band, v_band, out_tile in zip(
                run.tiles(q3), run.bands(k3), run.bands(v3), run.tiles_by_lane(out), strict=True
            ):
                _weigh(q_tile, k_band, by_query_and_key, weights)
                if dropout:
                    kept.append(keep_mask(weights, dropout))
                    weights.mul_(scaled_mask(kept[-1], dropout, weights.dtype))
                # Copied into place: torch has no batched product into a part of a tensor, only matrix by matrix.
                out_tile.copy_(torch.bmm(weights, v_band).view(out_tile.shape))
        ctx.save_for_backward(q, k, v, bias)
        ctx.kept, ctx.dropout = kept, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, bias = ctx.saved_tensors
        B, H, N, K = q.shape
        by_query_and_key = spread_over_tile(bias, min(TILE_WIDTH, N))
        q3, k3, v3, d_out = (x.flatten(0, 1) for x in (q, k, v, grads[0]))
        dq, dk, dv = q.new_empty(B, N, H, K).transpose(1, 2), torch.zeros_like(k3), torch.zeros_like(v3)
        d_bias = torch.zeros_like(by_query_and_key)
        kept = iter(ctx.kept)
        for run in _runs(q.shape, bias.shape[1]):
            weights, d_weights = run.buffer(q), run.buffer(q)
            n, L = weights.shape[1:]
            for q_tile, d_out_tile, dq_tile, k_band, v_band, dk_band, dv_band in zip(
                *(run.tiles(q3), run.tiles(d_out), run.tiles_by_lane(dq)),
                *map(run.bands, (k3, v3, dk, dv)),
                strict=True,
            ):
                _weigh(q_tile, k_band, by_query_and_key, weights)
                torch.bmm(d_out_tile, v_band.mT, out=d_weights)
                dropped = weights
                if ctx.dropout:
                    mask = scaled_mask(next(kept), ctx.dropout, weights.dtype)
                    dropped = weights * mask
                    d_weights.mul_(mask)
                dv_band += torch.bmm(dropped.mT, d_out_tile)
                d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=d_weights)
                dq_tile.copy_(torch.bmm(d_logits, k_band).view(dq_tile.shape))
                dk_band += torch.bmm(d_logits.mT, q_tile)
                d_bias[:, :n, :L] += d_logits.view(-1, H, n, L).sum(0) if len(d_logits) > H else d_logits
        return dq, dk.view(k.shape), dv.view(v.shape), gather_from_tile(d_bias, bias.shape[1]), None


class _Run(NamedTuple):
    """Tiles of one shape, one after the other: of these lanes, `width` queries each from `start` to `end`."""

    lanes: slice
    H: int
    start: int
    end: int
    width: int
    window: int

    def tiles(self, x3: Tensor) -> tuple[Tensor, ...]:
        """(B * H, N, K) -> the queries of each tile, (lanes * H, w, K)."""
        pairs = slice(self.lanes.start * self.H, self.lanes.stop * self.H)
        return x3[pairs, self.start : self.end].split(self.width, dim=1)

    def tiles_by_lane(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, H, N, K) -> (lanes, H, w, K)."""
        return x[self.lanes, :, self.start : self.end].split(self.width, dim=2)

    def bands(self, x3: Tensor) -> tuple[Tensor, ...]:
        """(B * H, W + N, K) -> the keys that the queries of each tile see, (lanes * H, w + W, K). They overlap."""
        pairs = slice(self.lanes.start * self.H, self.lanes.stop * self.H)
        firsts = range(self.start, self.end, self.width)
        return tuple(x3[pairs, first : first + self.width + self.window] for first in firsts)

    def buffer(self, like: Tensor) -> Tensor:
        """A buffer for a tile's logits and weights, reused by every tile, so that it stays in the cache."""
        lanes = self.lanes.stop - self.lanes.start
        return like.new_empty(lanes * self.H, self.width, self.width + self.window)


def _runs(shape: torch.Size, window: int) -> Iterator[_Run]:
    B, H, N, _ = shape
    width = min(TILE_WIDTH, N)
    whole = N - N % width
    lanes_at_once = max(1, NUMBERS_AT_ONCE // (H * width * (width + window)))
    for lane in range(0, B, lanes_at_once):
        lanes = slice(lane, min(lane + lanes_at_once, B))
        yield _Run(lanes, H, 0, whole, width, window)
        if whole < N:
            yield _Run(lanes, H, whole, N, N - whole, window)


def _weigh(q_tile: Tensor, k_band: Tensor, by_query_and_key: Tensor, weights: Tensor) -> None:
    """The attention weights of a tile, into `weights` (lanes * H, w, w + W)."""
    n, L = weights.shape[1:]
    weights.view(-1, len(by_query_and_key), n, L).copy_(by_query_and_key[:, :n, :L])
    weights.baddbmm_(q_tile, k_band.mT)  # adds to what is there
    torch.softmax(weights, -1, out=weights)


def spread_over_tile(bias: Tensor, width: int) -> Tensor:
    """(H, W), oldest key first -> (H, w, w + W) by query and key; minus infinity where a query does not attend.

    Query i sees the keys i to i + W - 1 of its tile: every row is the row above, shifted right by one. In reverse
    order, such rows overlap in one padded list, and the tile is a view of it.
    """
    padded = F.pad(bias, (width - 1, width), value=float("-inf"))
    # Contiguous rows: every tile copies it, and copying the transposed layout takes ten times as long.
    return padded.unfold(1, width + bias.shape[1], 1).flip(1).contiguous()


def gather_from_tile(tile: Tensor, window: int) -> Tensor:
    """The gradient of `spread_over_tile`: sums along the diagonals, (H, w, w + W) -> (H, W)."""
    _, width, L = tile.shape
    # Rows that are read as one number longer than they are shift row i to the left by i: diagonals become columns.
    sheared = F.pad(tile.flatten(1), (0, width)).unflatten(1, (width, L + 1))
    return sheared[..., :window].sum(1)

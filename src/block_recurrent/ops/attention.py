"""Attention in two forms: over a sliding window, and over a given set of keys.

All tensors are (B, H, positions, K). Queries come with the head's learned scale already multiplied in, so there is no
1/sqrt(K) and no further scale here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.attention import cpp_attention
from block_recurrent.ops.dropout import dropout as drop
from block_recurrent.ops.norm import at_least_float32
from block_recurrent.ops.tiled import spread_over_tile, tiled_window_attention


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H*K) -> (B, H, N, K)."""
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, K) -> (B, N, H*K)."""
    return x.transpose(-3, -2).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Every query over every key: no mask, no bias. (B, H, positions, K)."""
    chosen = registry.select("attend", q, weights=q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
    if chosen == "cpp":
        return cpp_attention(q, k, v, q.new_zeros(q.shape[1], k.shape[2]), dropout, slide=False)
    if chosen == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=1.0)
    weights = drop(at_least_float32(q @ k.transpose(-1, -2)).softmax(-1), dropout)
    return weights.to(v.dtype) @ v


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float = 0.0, *, fixed_keys: int = 0
) -> Tensor:
    """Each of the N queries over the W keys before its own position (SPEC section 2, point 4).

    q (B, H, N, K); k and v (B, H, C + N, K), perhaps in another dtype: at least W keys before the first query, then
    the queries' own; bias (H, W): what is added to the logits of the W keys, the oldest first. Returns (B, H, N, K).

    `fixed_keys`: so many of the first keys and values need no gradient, and may get none.
    """
    window, num_queries = bias.shape[1], q.shape[2]
    if num_queries == 0:
        return torch.zeros_like(q)
    first = k.shape[2] - num_queries - window
    k, v = k[:, :, first:].to(q.dtype), v[:, :, first:].to(q.dtype)
    chosen = registry.select("window_attention", q, queries=num_queries)
    if chosen == "cpp":
        return cpp_attention(q, k, v, bias, dropout, slide=True, fixed_keys=max(0, fixed_keys - first))
    if chosen == "tiled":
        return tiled_window_attention(q, k, v, bias, dropout)
    return _window_attention(q, k, v, bias, dropout)


def _window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """The reference, with W + N keys: all tiles at once, each of w queries, at most W, over w + W keys."""
    window, num_queries = bias.shape[1], q.shape[2]
    width = min(window, num_queries)
    if padding := -num_queries % width:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q_tiles = q.unflatten(2, (-1, width))  # (B, H, T, w, K)
    k_tiles, v_tiles = (x.unfold(2, width + window, width) for x in (k, v))  # (B, H, T, K, w + W)
    logits = at_least_float32(q_tiles @ k_tiles) + spread_over_tile(bias, width)[:, None]
    weights = F.dropout(logits.softmax(-1), dropout).to(v.dtype)
    return (weights @ v_tiles.transpose(-1, -2)).flatten(2, 3)[:, :, :num_queries]

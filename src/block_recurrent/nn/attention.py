"""Attention in two forms: over a sliding window, and over a given set of keys.

All tensors are (B, H, positions, K). Queries come with the head's learned scale already multiplied in, so there is no
1/sqrt(K) and no further scale here.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.nn.norm import at_least_float32


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H*K) -> (B, H, N, K)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, K) -> (B, N, H*K)."""
    return x.transpose(-3, -2).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Every query over every key: no mask, no bias. Leading axes are batch axes."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=1.0)


def window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """Each of the N queries over the W keys before its own position (SPEC section 2, point 4).

    q (B, H, N, K); k and v (B, H, W + N, K): the W keys before the first query, then the queries' own; bias (H, W): what
    is added to the logits at distances 1 to W. Returns (B, H, N, K).

    The queries are cut into tiles of at most W; a tile of w queries needs w + W keys.
    """
    window, num_queries = bias.shape[1], q.shape[2]
    width = min(window, num_queries)
    if width == 0:
        return torch.zeros_like(q)
    if padding := -num_queries % width:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q_tiles = q.unflatten(2, (-1, width))  # (B, H, T, w, K)
    k_tiles, v_tiles = (x.unfold(2, width + window, width) for x in (k, v))  # (B, H, T, K, w + W)
    logits = q_tiles @ k_tiles
    logits += _tile_of_distances(bias, width)[:, None]
    weights = at_least_float32(logits).softmax(-1).to(v.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = weights @ v_tiles.transpose(-1, -2)
    return out.flatten(2, 3)[:, :, :num_queries]


def _tile_of_distances(bias: Tensor, width: int) -> Tensor:
    """(H, W) by distance -> (H, w, w + W) by query and key; minus infinity where the distance is not 1 to W."""
    distances, forbidden = _distances(width, bias.shape[1], bias.device)
    return bias[:, distances].masked_fill(forbidden, float("-inf"))


@functools.lru_cache(maxsize=64)
def _distances(width: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index into the bias (distance - 1) for each query and key of a tile, and where there is none."""
    query = torch.arange(width, device=device)[:, None] + window
    key = torch.arange(width + window, device=device)[None, :]
    distance = query - key
    return (distance - 1).clamp(0, window - 1), (distance < 1) | (distance > window)

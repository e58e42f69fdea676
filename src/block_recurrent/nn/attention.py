"""Attention in two forms: over a sliding window, and over a given set of keys.

All tensors are (B, H, positions, K). Queries come with the head's learned scale already multiplied in, so there is no
1/sqrt(K) and no further scale here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.nn.dropout import dropout as drop
from block_recurrent.nn.native import usable_for
from block_recurrent.nn.native.attention import FEWEST_QUERIES, native_attend, native_window_attention
from block_recurrent.nn.norm import at_least_float32
from block_recurrent.nn.tiles import spread_over_tile, tiled_window_attention

LARGE = 2**23
"""So many attention weights don't stay in the caches: the kernel, which makes them twice, is then faster than torch."""


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H*K) -> (B, H, N, K); one token each, (B, H*K) -> (B, H, 1, K)."""
    if x.ndim == 2:
        return x.view(x.shape[0], num_heads, 1, -1)
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, K) -> (B, N, H*K)."""
    return x.transpose(-3, -2).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Every query over every key: no mask, no bias. Leading axes are batch axes."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=1.0)
    if q.ndim == 4 and q.numel() // q.shape[-1] * k.shape[-2] >= LARGE and usable_for(q):
        return native_attend(q, k, v, dropout)
    # Three plain steps: at our sizes faster than SDPA on a CPU, whose backward pass computes the logits again.
    weights = drop(at_least_float32(q @ k.transpose(-1, -2)).softmax(-1), dropout)
    return weights.to(v.dtype) @ v


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float = 0.0, *, fixed_keys: int = 0
) -> Tensor:
    """Each of the N queries over the W keys before its own position (SPEC section 2, point 4).

    q (B, H, N, K); k and v (B, H, C + N, K), perhaps in another precision: at least W keys before the first query, then
    the queries' own; bias (H, W): what is added to the logits of the W keys, the oldest first. Returns (B, H, N, K).

    `fixed_keys`: so many of the first keys and values need no gradient, and may get none.
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    window, num_queries = bias.shape[1], q.shape[2]
    first = k.shape[2] - num_queries - window
    if num_queries == 0:
        return torch.zeros_like(q)
    k, v = k[:, :, first:], v[:, :, first:]
    if num_queries >= FEWEST_QUERIES and usable_for(q):
        return native_window_attention(q, k, v, bias, dropout, max(0, fixed_keys - first))
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return tiled_window_attention(q, k, v, bias, dropout)
    return plain_window_attention(q, k, v, bias, dropout)


def one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same for a single query, as in writing, over the newest W of the keys before it; bias (H, 1, W).

    No tile, no mask and no dropout. Every call counts here, and `@` makes five of one product. SDPA would be one call,
    but a slower one.
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    B, H, _, K = q.shape
    if (older := k.shape[2] - bias.shape[2]) > 0:
        k, v = k.narrow(2, older, bias.shape[2]), v.narrow(2, older, bias.shape[2])
    q, k, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    if B == 1 and bias.dtype == q.dtype:
        weights = torch.baddbmm(bias, q, k).softmax(-1)
    else:
        logits = at_least_float32(torch.bmm(q, k)).view(B, H, 1, -1) + bias
        weights = logits.flatten(0, 1).softmax(-1).to(v.dtype)
    return torch.bmm(weights, v).view(B, H, 1, K)


def plain_window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """The same in plain steps, with W + N keys and all tiles at once: w queries, at most W, over w + W keys."""
    window, num_queries = bias.shape[1], q.shape[2]
    width = min(window, num_queries)
    if padding := -num_queries % width:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q_tiles = q.unflatten(2, (-1, width))  # (B, H, T, w, K)
    k_tiles, v_tiles = (x.unfold(2, width + window, width) for x in (k, v))  # (B, H, T, K, w + W)
    logits = at_least_float32(q_tiles @ k_tiles) + spread_over_tile(bias, width)[:, None]
    weights = F.dropout(logits.softmax(-1), dropout).to(v.dtype)
    return (weights @ v_tiles.transpose(-1, -2)).flatten(2, 3)[:, :, :num_queries]

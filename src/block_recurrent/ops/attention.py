"""Attention: over a sliding window, over a given set of keys, and of the recurrent state in a block's step.

Tensors are (B, H, positions, K) unless noted otherwise. Queries have the head's learned scale already
multiplied in, so there is no 1/sqrt(K) and no further scale here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.attention import cpp_attend, cpp_window_attention
from block_recurrent.ops.cpp.states import cpp_state_step
from block_recurrent.ops.dropout import dropout as drop
from block_recurrent.ops.lanes import fan_out
from block_recurrent.ops.norm import EPSILON, at_least_float32, rms_norm, unit_heads
from block_recurrent.ops.precision import product_dtype
from block_recurrent.ops.tiled import spread_over_tile, tiled_window_attention
from block_recurrent.ops.triton.attention import triton_window_attention


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H*K) -> (B, H, N, K)."""
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, K) -> (B, N, H*K)."""
    return x.transpose(-3, -2).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Every query over every key: no mask, no bias. (B, H, positions, K)."""
    return attend_each(q, [k], [v], dropout)


def attend_each(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], dropout: float = 0.0) -> Tensor:
    """q (B, H, T * n, K): the queries of T blocks, each over the keys and values of its own, (B, H, m, K). Like q."""
    if q.shape[2] == 0:
        return torch.zeros_like(q)
    pairs, queries = q.shape[0] * q.shape[1] * len(keys), q.shape[2] // len(keys)
    chosen = registry.select("attend", q, pairs=pairs, queries=queries, keys=keys[0].shape[2])
    if chosen == "cpp":
        return cpp_attend(q, keys, values, dropout)
    if len(keys) == 1:
        return _attend(q, keys[0], values[0], dropout, chosen)
    # Blocks become separate lanes.
    k, v = (torch.stack(list(x), dim=1).flatten(0, 1) for x in (keys, values))
    lanes = q.unflatten(2, (len(keys), -1)).transpose(1, 2).flatten(0, 1)
    return _attend(lanes, k, v, dropout, chosen).unflatten(0, (-1, len(keys))).transpose(1, 2).flatten(2, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, chosen: str) -> Tensor:
    if chosen == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=1.0)
    weights = drop(at_least_float32(q @ k.transpose(-1, -2)).softmax(-1), dropout)
    return weights.to(v.dtype) @ v


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float = 0.0, *, fixed_keys: int = 0
) -> Tensor:
    """Each of the N queries over the W keys before its own position.

    q (B, H, N, K); k and v (B, H, C + N, K), perhaps in another dtype: at least W keys before the first query, then
    the queries' own; bias (H, W): what is added to the logits of the W keys, the oldest first. Returns (B, H, N, K).

    `fixed_keys`: the number of first keys and values that need no gradient, and may get none.
    """
    window, num_queries = bias.shape[1], q.shape[2]
    if num_queries == 0:
        return torch.zeros_like(q)
    first = k.shape[2] - num_queries - window
    k, v = k[:, :, first:].to(q.dtype), v[:, :, first:].to(q.dtype)
    chosen = registry.select("window_attention", q, queries=num_queries, head=q.shape[3])
    if chosen == "cpp":
        return cpp_window_attention(q, k, v, bias, dropout, max(0, fixed_keys - first))
    if chosen == "triton":
        return triton_window_attention(q, k, v, bias, dropout, fixed_keys=max(0, fixed_keys - first))
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


class StateView(NamedTuple):
    """Keys, values and queries of S state vectors, (B, H, S, K)."""

    keys: Tensor
    values: Tensor
    self_queries: Tensor
    token_queries: Tensor

    def for_readers(self, count: int) -> list[StateView]:
        """The view for each layer that reads its keys and values."""
        shown = zip(fan_out(self.keys, count), fan_out(self.values, count), strict=True)
        return [self._replace(keys=keys, values=values) for keys, values in shown]


class StateWeights(NamedTuple):
    """The weights that make a view of a state."""

    norm: Tensor
    """(D,)"""
    ids: Tensor
    """(S, D)"""
    projection: Tensor
    """(4HK, D): maps to values, keys, queries to the states, queries to the tokens."""
    scales: Tensor
    """(3H,): scales of all but the values."""


def state_view(state: Tensor, weights: StateWeights) -> StateView:
    """Keys, values and queries of a state (B, S, D)."""
    # The IDs are added after the norm, so that states always differ from each other (paper, section 3.2).
    joined = F.linear(rms_norm(state, weights.norm) + weights.ids, weights.projection)
    heads = split_heads(joined, len(weights.scales) // 3 * 4)
    values, keys, self_queries, token_queries = unit_heads(heads, weights.scales.view(-1, 1, 1))
    return StateView(keys, values, self_queries, token_queries)


def state_step(
    state: Tensor,
    weights: StateWeights,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    view: StateView | None = None,
) -> tuple[StateView, Tensor]:
    """The view of a state, and its attention over itself and over tokens, concatenated: (B, S, 2HK).

    keys and values: those of the tokens, (B, H, n, K) each, one after the other. `view`: where it is known.
    """
    if view is None and _backend(state, weights, keys) == "cpp":
        attention, *parts = cpp_state_step(state, weights, keys, values, EPSILON)
        return StateView(*parts), attention
    view = view or state_view(state, weights)
    by_self = attend(view.self_queries, view.keys, view.values)
    all_keys, all_values = (x[0] if len(x) == 1 else torch.cat(list(x), dim=2) for x in (keys, values))
    by_tokens = attend(view.token_queries, all_keys, all_values)
    return view, torch.cat([merge_heads(by_self), merge_heads(by_tokens)], dim=2)


def _backend(state: Tensor, weights: StateWeights, keys: Sequence[Tensor]) -> str:
    return registry.select(
        "state_step",
        state,
        width=state.shape[2],
        head_width=keys[0].shape[3],
        keys=sum(x.shape[2] for x in keys),
        mixed=product_dtype(state) != state.dtype or any(x.dtype != state.dtype for x in (*weights, *keys)),
    )

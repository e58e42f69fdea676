"""One block's step of the recurrent state: what S vectors show and ask, and what they find among themselves and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.attention import attend, merge_heads, split_heads
from block_recurrent.ops.cpp.states import cpp_state_step
from block_recurrent.ops.norm import EPSILON, rms_norm, unit_heads


class StateView(NamedTuple):
    """What S state vectors show to whoever reads them, and what they ask, (B, H, S, K)."""

    keys: Tensor
    values: Tensor
    self_queries: Tensor
    token_queries: Tensor


class StateWeights(NamedTuple):
    """What makes a view of a state."""

    norm: Tensor
    """(D,)"""
    ids: Tensor
    """(S, D)"""
    projection: Tensor
    """(4HK, D): to values, keys, queries to the states, queries to the tokens."""
    scales: Tensor
    """(3H,): of all but the values."""


def state_view(state: Tensor, weights: StateWeights) -> StateView:
    """What a state (B, S, D) shows and asks."""
    # The IDs come after the norm, so that states differ from each other whatever they hold (paper, section 3.2).
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
    """The view of a state, and its attention over itself and, beside it, over tokens: (B, S, 2HK).

    keys and values: those of the tokens, (B, H, n, K) each, one after the other. `view`: where it is known.
    """
    if view is None and _backend(state, weights, keys) == "cpp":
        attention, *parts = cpp_state_step(state, weights, keys, values, EPSILON)
        return StateView(*parts), attention
    view = view or state_view(state, weights)
    by_self = attend(view.self_queries, view.keys, view.values)
    by_tokens = attend(view.token_queries, torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2))
    return view, merge_heads(torch.cat([by_self, by_tokens], dim=1))


def _backend(state: Tensor, weights: StateWeights, keys: Sequence[Tensor]) -> str:
    return registry.select(
        "state_step",
        state,
        width=state.shape[2],
        head_width=keys[0].shape[3],
        keys=sum(x.shape[2] for x in keys),
        mixed=torch.is_autocast_enabled(state.device.type) or any(x.dtype != state.dtype for x in (*weights, *keys)),
    )

"""A block's step of the recurrent state as one operator: products by torch, the rest by `norm.c` and `attention.c`.

With operators of torch it would be about twenty small ones, and twice as many in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from block_recurrent.ops.cpp import once_differentiable, tokens_first, with_rows
from block_recurrent.ops.cpp.attention import Attention
from block_recurrent.ops.cpp.norm import norm_gradients_into, normalize


def cpp_state_step(
    state: Tensor, weights: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], epsilon: float
) -> tuple[Tensor, ...]:
    """As `attention.state_step`: attention (B, S, 2HK); keys, values and both queries of the state, (B, H, S, K)."""
    rows = [with_rows(x) for x in keys], [with_rows(x) for x in values]
    parts = [x.contiguous() for x in (state, *weights)]
    attention, own_keys, own_values, queries, *_ = torch.ops.brt.state_step(*parts, *rows, epsilon)
    return attention, own_keys, own_values, *queries.chunk(2, dim=1)


class _Inputs(NamedTuple):
    state: Tensor
    norm: Tensor
    ids: Tensor
    projection: Tensor
    scales: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    epsilon: float

    @property
    def H(self) -> int:  # noqa: N802
        return len(self.scales) // 3

    @property
    def K(self) -> int:  # noqa: N802
        return self.keys[0].shape[3]

    def factors(self) -> Tensor:
        """The scales (3H, K), as `norm.c` takes them."""
        return self.scales[:, None].expand(-1, self.K).contiguous()

    def heads(self, joined: Tensor) -> Tensor:
        """(B, S, heads * K) -> (B, heads, S, K)."""
        return joined.unflatten(2, (-1, self.K)).transpose(1, 2)

    def room(self, heads: int) -> Tensor:
        """For (B, heads, S, K)."""
        return self.heads(self.state.new_empty(*self.state.shape[:2], heads * self.K))


_ARGUMENTS = (
    "Tensor state, Tensor norm, Tensor ids, Tensor projection, Tensor scales, Tensor[] keys, Tensor[] values, "
    "float epsilon"
)
torch.library.define("brt::state_step", f"({_ARGUMENTS}) -> Tensor[]")
torch.library.define(
    "brt::state_step_backward",
    f"({_ARGUMENTS}, Tensor[] results, Tensor[] d_results) -> (Tensor[], Tensor[], Tensor[])",
)


@torch.library.register_fake("brt::state_step")
def _room(*arguments: Any) -> list[Tensor]:
    given = _Inputs(*arguments)
    (B, S, D), H = given.state.shape, given.H
    attention, joined = (given.state.new_empty(B, S, heads * given.K) for heads in (2 * H, 4 * H))
    log_sums = (given.state.new_empty(B, H, S) for _ in range(2))
    parts = (given.room(heads) for heads in (H, H, 2 * H))
    return [attention, *parts, given.state.new_empty(B, S, D), joined, *log_sums]


@torch.library.impl("brt::state_step", "CPU")
def _state_step(*arguments: Any) -> list[Tensor]:
    given = _Inputs(*arguments)
    state, H, epsilon = given.state, given.H, given.epsilon
    (B, S, D), factors = state.shape, given.factors()
    x = normalize(state.view(1, 1, -1, D), given.norm.view(1, D), 1 / D, epsilon).view(B, S, D).add_(given.ids)
    joined = torch.mm(x.view(-1, D), given.projection.T).view(B, S, -1)
    values, keys, queries = given.heads(joined).split_with_sizes([H, H, 2 * H], dim=1)
    values = given.room(H).copy_(values)
    keys, queries = normalize(keys, factors[:H], 1.0, epsilon), normalize(queries, factors[H:], 1.0, epsilon)
    attention = state.new_empty(B, S, 2 * H * given.K)
    by_self, by_tokens = given.heads(attention).chunk(2, dim=1)
    log_sums = (
        Attention(queries[:, :H], [keys], [values]).into(by_self),
        Attention(queries[:, H:], given.keys, given.values).into(by_tokens),
    )
    return [attention, keys, values, queries, x, joined, *log_sums]


@torch.library.register_fake("brt::state_step_backward")
def _backward_room(*arguments: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    given = _Inputs(*arguments[:8])
    keys, values = ([tokens_first(x) for x in rows] for rows in (given.keys, given.values))
    return [x.new_empty(x.shape) for x in given[:5]], keys, values


@torch.library.impl("brt::state_step_backward", "CPU")
def _state_step_backward(*arguments: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    given, (results, d_results) = _Inputs(*arguments[:8]), arguments[8:]
    state, H, epsilon = given.state, given.H, given.epsilon
    attention, keys, values, queries, x, joined, by_self_sums, by_token_sums = results
    D, heads, d_joined, d_unit = state.shape[2], given.heads(joined), torch.empty_like(joined), given.room(3 * H)
    d_heads = given.heads(d_joined)
    d_values, (d_keys, d_self, d_token) = d_heads[:, :H], d_unit.split(H, dim=1)
    d_token_keys, d_token_values = ([tokens_first(x) for x in rows] for rows in (given.keys, given.values))
    (by_self, by_tokens), (d_by_self, d_by_tokens) = (given.heads(x).chunk(2, 1) for x in (attention, d_results[0]))
    Attention(queries[:, :H], [keys], [values]).gradients_into(
        d_self, [d_keys], [d_values], None, (by_self, by_self_sums), d_by_self
    )
    Attention(queries[:, H:], given.keys, given.values).gradients_into(
        d_token, d_token_keys, d_token_values, None, (by_tokens, by_token_sums), d_by_tokens
    )
    # Gradients of keys, values and queries from elsewhere, if any.
    for to, others in zip((d_keys, d_values, d_unit[:, H:]), d_results[1:], strict=True):
        if others.numel():
            to += others
    d_factors = norm_gradients_into(d_heads[:, H:], heads[:, H:], given.factors(), d_unit, 1.0, epsilon)
    flat = d_joined.view(-1, d_joined.shape[2])
    d_projection, d_x = flat.T @ x.view(-1, D), torch.mm(flat, given.projection)
    d_state = torch.empty_like(state)
    rows = d_state.view(1, 1, -1, D), state.view(1, 1, -1, D), given.norm.view(1, D), d_x.view(1, 1, -1, D)
    d_norm = norm_gradients_into(*rows, 1 / D, epsilon).view(D)
    own = [d_state, d_norm, d_x.view(state.shape).sum(0), d_projection, d_factors.sum(1)]
    return own, d_token_keys, d_token_values


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *own, keys, values, ctx.epsilon = inputs
    ctx.save_for_backward(*own, *output, *keys, *values)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    own, results, rows = ctx.saved_tensors[:5], list(ctx.saved_tensors[5:13]), ctx.saved_tensors[13:]
    keys, values = list(rows[: len(rows) // 2]), list(rows[len(rows) // 2 :])
    d_attention = torch.zeros_like(results[0]) if grads[0] is None else grads[0].contiguous()
    d_results = [d_attention, *(results[0].new_empty(0) if d is None else d for d in grads[1:4])]
    d_own, d_keys, d_values = torch.ops.brt.state_step_backward(*own, keys, values, ctx.epsilon, results, d_results)
    return *d_own, d_keys, d_values, None


torch.library.register_autograd("brt::state_step", _gradients, setup_context=_save)
once_differentiable("brt::state_step_backward")

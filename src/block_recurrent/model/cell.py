"""The recurrent cell: the horizontal direction, from one block's state to the next (SPEC sections 3 and 4)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from block_recurrent.config import GATE_CONFIGS, ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.memory import KeptView
from block_recurrent.nn.attention import attend, merge_heads, split_heads
from block_recurrent.nn.gates import GATES, Gate
from block_recurrent.nn.kept import Watch
from block_recurrent.nn.linear import join, linear, normal, ones
from block_recurrent.nn.norm import RMSNorm, values_and_units
from block_recurrent.nn.rows import Function


class KeysAndValues(NamedTuple):
    """What tokens show to a query, (B, H, tokens, K)."""

    keys: Tensor
    values: Tensor


class StateView(NamedTuple):
    """What S state vectors show to whoever reads them, and what they ask, (B, H, S, K)."""

    keys: Tensor
    values: Tensor
    self_queries: Tensor
    token_queries: Tensor


class _Prepared(NamedTuple):
    """What a cell works out from its weights alone."""

    projection: Function
    """All maps of a state at once, D -> 4*H*K."""
    scales: Tensor
    """Of keys, which have none, and of the two kinds of queries, (3H, 1, 1)."""


class RecurrentCell(nn.Module):
    """S state vectors that attend to themselves and to two blocks of tokens, with gates instead of residuals."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, HK, S = config.d_model, config.num_heads * config.head_dim, config.num_states
        self.num_heads = config.num_heads
        self.initial_state = normal(S, D, deviation=0.1)
        self.state_ids = normal(S, D, deviation=1.0)
        self.norm = RMSNorm(D)
        self.to_keys = linear(D, HK)
        self.to_values = linear(D, HK)
        self.to_self_queries = linear(D, HK)
        self.to_token_queries = linear(D, HK)
        self.self_scale = ones(config.num_heads)
        self.token_scale = ones(config.num_heads)
        self.update = UPDATES[config.gate_config](config, 2 * HK)
        self._watch = Watch()

    def fresh_state(self, lanes: int) -> Tensor:
        """The learned initial state of a document, (B, S, D)."""
        return self.initial_state.expand(lanes, -1, -1)

    def view(self, state: Tensor, prepared: _Prepared | None = None) -> StateView:
        """What a state shows and asks. `prepared`: what `_prepare` gives, where the caller has it."""
        H, (projection, scales) = self.num_heads, prepared or self._prepare()
        # The IDs come after the norm, so that states differ from each other whatever they hold (paper, section 3.2).
        heads = split_heads(projection(self.norm(state) + self.state_ids), 4 * H)
        values, keys, self_queries, token_queries = values_and_units(heads, scales)
        return StateView(keys, values, self_queries, token_queries)

    def kept_view(self, kept: KeptView | None, state: Tensor) -> StateView | None:
        """The view that was kept from an earlier call, if it is this state's and the weights have not changed since."""
        if kept is None or kept.state is not state or torch.is_grad_enabled() or kept.watch is not self._present():
            return None
        return StateView(*kept.view)

    def keep(self, view: StateView, state: Tensor) -> KeptView | None:
        """A state's view, for the next call; none in training, where weights and graphs change."""
        return None if torch.is_grad_enabled() else KeptView(view, state, self._present())

    def scan(
        self, state: Tensor, tokens: KeysAndValues, grid: BlockGrid, first: StateView | None
    ) -> tuple[list[StateView], Tensor]:
        """Run over the blocks of a call: the one sequential part of the model.

        `tokens`: the tokens' keys and values, (B, H, C + N, K), cached ones first; `first`: the view of `state`, where
        it is known. Returns the view at the start of each of the T blocks, and the state after the blocks that each
        lane completed.
        """
        prepared = self._prepare() if first is None or grid.most_completed else None
        pairs = [self._pairs_of_blocks(x, grid) for x in tokens] if grid.most_completed else []
        states, views = [state], [first or self.view(state, prepared)]
        for block, two_blocks in enumerate(zip(*pairs, strict=True)):
            state = self.update(self._attention(views[block], KeysAndValues(*two_blocks)), state)
            states.append(state)
            if block + 1 < grid.num_blocks:
                views.append(self.view(state, prepared))
        if len(set(grid.completed)) == 1:
            return views, states[grid.completed[0]]
        return views, torch.stack([states[count][lane] for lane, count in enumerate(grid.completed)])

    @staticmethod
    def _pairs_of_blocks(x: Tensor, grid: BlockGrid) -> list[Tensor]:
        """Each block that was completed, with the one before it: (B, H, 2W, K)."""
        # Unbound at once: a slice per block would have the backward pass fill and add the whole buffer for each block.
        blocks = grid.keys_of_completed(x, blocks_before=1).unflatten(2, (-1, grid.window)).unbind(2)
        return [torch.cat(pair, dim=2) for pair in itertools.pairwise(blocks)]

    def _prepare(self) -> _Prepared:
        """For all blocks of a call."""
        scales = [torch.ones_like(self.self_scale), self.self_scale.abs(), self.token_scale.abs()]
        return _Prepared(join(*self._maps()), torch.cat(scales).view(-1, 1, 1))

    def _maps(self) -> tuple[nn.Linear, ...]:
        return self.to_values, self.to_keys, self.to_self_queries, self.to_token_queries

    def _present(self) -> Watch:
        """On the cell as it is; another one after every change."""
        if self._watch.changed():
            self._watch = Watch(self)
        return self._watch

    @staticmethod
    def _attention(own: StateView, tokens: KeysAndValues) -> Tensor:
        """Self-attention of the states beside cross-attention to the tokens of two blocks: (B, S, 2*H*K)."""
        by_self = attend(own.self_queries, own.keys, own.values)
        by_tokens = attend(own.token_queries, tokens.keys, tokens.values)
        return merge_heads(torch.cat([by_self, by_tokens], dim=1))


class SkipUpdate(nn.Module):
    """One gate on the attention; no MLP."""

    def __init__(self, config: ModelConfig, attention_dim: int) -> None:
        super().__init__()
        self.attention_gate = make_gate(config, attention_dim)

    def forward(self, attention: Tensor, state: Tensor) -> Tensor:
        return self.attention_gate(attention, state)


class SingleUpdate(nn.Module):
    """A hidden layer straight from the attention, then one gate."""

    def __init__(self, config: ModelConfig, attention_dim: int) -> None:
        super().__init__()
        self.hidden = linear(attention_dim, config.mlp_dim)
        self.mlp_gate = make_gate(config, config.mlp_dim)

    def forward(self, attention: Tensor, state: Tensor) -> Tensor:
        return self.mlp_gate(self.hidden(attention).relu(), state)


class DualUpdate(nn.Module):
    """A gate on the attention, then an MLP with a gate of its own."""

    def __init__(self, config: ModelConfig, attention_dim: int) -> None:
        super().__init__()
        self.attention_gate = make_gate(config, attention_dim)
        self.mlp_norm = RMSNorm(config.d_model)
        self.hidden = linear(config.d_model, config.mlp_dim)
        self.mlp_gate = make_gate(config, config.mlp_dim)

    def forward(self, attention: Tensor, state: Tensor) -> Tensor:
        state = self.attention_gate(attention, state)
        return self.mlp_gate(self.hidden(self.mlp_norm(state)).relu(), state)


UPDATES: dict[str, type[nn.Module]] = {"dual": DualUpdate, "single": SingleUpdate, "skip": SkipUpdate}


def register_update(name: str, update: type[nn.Module]) -> None:
    """Make an update of the state known under the name that `ModelConfig.gate_config` gives it.

    `update(config, attention_dim)` makes the module, whose `forward(attention, state)` gives the next state.
    """
    if name not in GATE_CONFIGS:
        GATE_CONFIGS.append(name)
    UPDATES[name] = update


def make_gate(config: ModelConfig, in_dim: int) -> Gate:
    """The gate that the configuration names."""
    return GATES[config.gate](in_dim, config.d_model, config.has_gate_bias, config.has_gate_tanh)

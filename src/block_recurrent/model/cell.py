"""The recurrent cell: the horizontal direction, from one block's state to the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from block_recurrent.config import GATE_CONFIGS, ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.nn.gates import GATES, Gate
from block_recurrent.nn.linear import constant, joined, linear, normal
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.ops import Average, KeysValues, StateView, StateWeights, state_scan, state_view, stated


class RecurrentCell(nn.Module):
    """S state vectors that attend to themselves and to two blocks of tokens, with gates instead of residuals."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, HK, S = config.d_model, config.num_heads * config.head_dim, config.num_states
        self.initial_state = normal(S, D, deviation=0.1)
        self.state_ids = normal(S, D, deviation=1.0)
        self.norm = RMSNorm(D)
        self.to_keys = linear(D, HK)
        self.to_values = linear(D, HK)
        self.to_self_queries = linear(D, HK)
        self.to_token_queries = linear(D, HK)
        self.self_scale = constant(config.num_heads, value=config.scale_init)
        self.token_scale = constant(config.num_heads, value=config.scale_init)
        self.update = UPDATES[config.gate_config](config, 2 * HK)

    def fresh_state(self, lanes: int) -> Tensor:
        """The learned initial state of a document, (B, S, D)."""
        return self.initial_state.expand(lanes, -1, -1)

    def weights(self) -> StateWeights:
        """The weights that make a view of a state, concatenated once for all blocks of a call."""
        maps = (self.to_values, self.to_keys, self.to_self_queries, self.to_token_queries)
        scales = (torch.ones_like(self.self_scale), self.self_scale.abs(), self.token_scale.abs())
        projection = joined(*maps)
        assert projection is not None
        return StateWeights(self.norm.weight, self.state_ids, projection, torch.cat(scales))

    def view(self, state: Tensor, weights: StateWeights | None = None) -> StateView:
        """Keys, values and queries of a state. `weights`: those of the cell, if known."""
        return state_view(state, weights or self.weights())

    def scan(
        self,
        state: Tensor | None,
        keys: Tensor,
        values: Tensor,
        grid: BlockGrid,
        weights: StateWeights,
        view: StateView | None = None,
    ) -> tuple[list[KeysValues], Tensor]:
        """Run over the blocks of a call: the only sequential part of the model.

        keys and values (B, H, C + N, K): the tokens', cached ones first; `view`: the view of `state`, if known.
        Returns keys and values of the state at the start of each of the T blocks, and the state after the blocks that
        each lane completed.
        """
        assert state is not None
        keys, values = (grid.keys_of_completed(x, blocks_before=1) for x in (keys, values))
        read, states = state_scan(state, weights, self.update, keys, values, grid.most_completed, view)
        if len(read) < grid.num_blocks:
            last = view or state_view(states[-1], weights)
            read.append((last.keys, last.values))
        if len(set(grid.completed)) == 1:
            return read, states[grid.completed[0]]
        return read, torch.stack([states[count][lane] for lane, count in enumerate(grid.completed)])


class SkipUpdate(nn.Module):
    """One gate on the attention; no MLP."""

    def __init__(self, config: ModelConfig, attention_dim: int) -> None:
        super().__init__()
        self.attention_gate = make_gate(config, attention_dim)

    def forward(self, attention: Tensor, state: Tensor) -> Tensor:
        return self.attention_gate(attention, state)

    def average(self) -> Average | None:
        """The gate's: nothing else is in it."""
        return stated(self.attention_gate, "average")


class SingleUpdate(nn.Module):
    """A hidden layer straight from the attention, then one gate."""

    def __init__(self, config: ModelConfig, attention_dim: int) -> None:
        super().__init__()
        self.hidden = linear(attention_dim, config.mlp_dim)
        self.mlp_gate = make_gate(config, config.mlp_dim)

    def forward(self, attention: Tensor, state: Tensor) -> Tensor:
        return self.mlp_gate(self.hidden(attention).relu(), state)


class DualUpdate(nn.Module):
    """A gate on the attention, then an MLP with a second gate."""

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
    """Register an update of the state, under the name for `ModelConfig.gate_config`.

    `update(config, attention_dim)` creates the module, whose `forward(attention, state)` returns the next state.
    """
    if name not in GATE_CONFIGS:
        GATE_CONFIGS.append(name)
    UPDATES[name] = update


def make_gate(config: ModelConfig, in_dim: int) -> Gate:
    """The gate that the configuration names."""
    gate = GATES[config.gate](in_dim, config.d_model, config.has_gate_bias, config.has_gate_tanh)
    gate.start_at(config.gate_init, config.gate_horizon)
    return gate

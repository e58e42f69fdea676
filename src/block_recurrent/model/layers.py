"""One layer of the stack: tokens up (SPEC sections 2, 3, 6 and 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.cell import KeysAndValues, RecurrentCell, StateView
from block_recurrent.model.memory import LayerMemory
from block_recurrent.model.recall import Recall
from block_recurrent.model.tape import extend
from block_recurrent.nn.attention import attend, merge_heads, split_heads, window_attention
from block_recurrent.nn.dropout import dropout
from block_recurrent.nn.kept import Kept
from block_recurrent.nn.linear import linear, ones, zeros
from block_recurrent.nn.mlp import MLP
from block_recurrent.nn.norm import RMSNorm, unit_length
from block_recurrent.nn.position import PositionBias


class Layer(nn.Module):
    """A pre-norm transformer layer with a sliding window; some also have a recurrent cell, or a memory to search."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        D, H, HK = config.d_model, config.num_heads, config.num_heads * config.head_dim
        self.config = config
        self.reads_state = config.layer_reads_state(number)
        memorizing = number in config.memory_layers
        self.attention_norm = RMSNorm(D)
        self.to_keys = linear(D, HK)
        self.to_values = linear(D, HK)
        self.to_queries = linear(D, HK)
        self.scale = ones(H)
        self.position_bias = None if memorizing else PositionBias(H)
        self._kept_bias = Kept()
        self.to_state_queries = linear(D, HK) if self.reads_state else None
        self.state_scale = ones(H) if self.reads_state else None
        self.recall_mix = zeros(H) if memorizing else None
        self.cell = RecurrentCell(config) if number in config.recurrent_layers else None
        self.project = linear(2 * HK if self.reads_state else HK, D)
        self.mlp_norm = RMSNorm(D)
        self.mlp = MLP(D, config.mlp_dim)

    def forward(
        self, x: Tensor, memory: LayerMemory, grid: BlockGrid, view: StateView | None = None
    ) -> tuple[Tensor, LayerMemory]:
        """x (B, N, D) -> x, and what the layer remembers next. `view`: the state to read in block feedback."""
        h = self._dropout(self.attention_norm(x))
        k = unit_length(self._heads(self.to_keys, h))
        v = self._heads(self.to_values, h)
        q = unit_length(self._heads(self.to_queries, h), self.scale.abs())
        dtype, cached = memory.keys.dtype, memory.keys.shape[2]
        keys, values, place = extend(memory.keys, memory.values, memory.place, k.to(dtype), v.to(dtype))
        recent = slice(cached - self.config.window, None)
        attention = window_attention(
            q,
            keys[:, :, recent].to(k.dtype),
            values[:, :, recent].to(v.dtype),
            self._bias(for_one_token=x.shape[1] == 1),
            self._attention_dropout,
        )
        state, recall, kept = memory.state, memory.recall, None
        if recall is not None:
            attention, recall = self._recall(attention, q, keys, values, recall, grid)
        if self.cell is not None:
            assert state is not None
            first = view or self.cell.kept_view(memory.view, state)
            views, state = self.cell.scan(state, KeysAndValues(keys, values), grid, first)
            attention = torch.cat([attention, self._read_states(h, views, grid)], dim=1)
            kept = self.cell.keep(views[-1], state) if grid.all_in_last_block else None
        elif view is not None:
            attention = torch.cat([attention, self._read_states(h, [view], grid)], dim=1)
        x = x + self.project(merge_heads(attention))
        x = x + self._dropout(self.mlp(self.mlp_norm(x)))
        newest_keys, newest_values = (grid.newest(buffer, cached) for buffer in (keys, values))
        return x, LayerMemory(newest_keys, newest_values, state, recall, place if grid.all_full else None, kept)

    def _read_states(self, h: Tensor, views: list[StateView], grid: BlockGrid) -> Tensor:
        """Each token over the state as it was at the start of its block, one view per block: (B, H, N, K)."""
        assert self.to_state_queries is not None
        assert self.state_scale is not None
        q = unit_length(self._heads(self.to_state_queries, h), self.state_scale.abs())
        if len(views) == 1:
            return attend(q, views[0].keys, views[0].values, self._attention_dropout)
        keys = torch.stack([view.keys for view in views], dim=2)  # (B, H, T, S, K)
        values = torch.stack([view.values for view in views], dim=2)
        return grid.out_of_blocks(attend(grid.into_blocks(q), keys, values, self._attention_dropout))

    def _recall(
        self, attention: Tensor, q: Tensor, keys: Tensor, values: Tensor, recall: Recall, grid: BlockGrid
    ) -> tuple[Tensor, Recall]:
        """Mix in what the memory holds. A block's queries see the memory as it was before the block."""
        assert self.recall_mix is not None
        W = grid.window
        new_keys, new_values = (grid.keys_of_completed(x, blocks_before=0) for x in (keys, values))
        found = []
        for block, q_block in enumerate(grid.into_blocks(q).unbind(2)):
            # q carries the head's scale, which is not negative and so does not change which keys are nearest.
            k, v = recall.search(q_block, self.config.memory_neighbors)
            weights = torch.einsum("bhqk,bhqnk->bhqn", q_block, k).softmax(-1)
            found.append(torch.einsum("bhqn,bhqnk->bhqk", weights, v))
            this = slice(block * W, (block + 1) * W)
            recall = recall.append(new_keys[:, :, this], new_values[:, :, this], [n > block for n in grid.completed])
        gate = self.recall_mix.sigmoid()[:, None, None].to(attention.dtype)
        recalled = grid.out_of_blocks(torch.stack(found, dim=2)).to(attention.dtype)
        return torch.lerp(attention, recalled, gate), recall

    def _heads(self, map: nn.Linear, h: Tensor) -> Tensor:
        return split_heads(map(h), self.config.num_heads)

    def _bias(self, for_one_token: bool) -> Tensor:
        """(H, W): what is added to the logits at each distance. The head's scale is on the bias too."""
        if self.position_bias is None:
            return self.scale.new_zeros(len(self.scale), self.config.window)
        if for_one_token:  # in writing, where it would be made anew for every token
            return self._kept_bias.get(self._biases, self.position_bias.table, self.scale)
        return self._biases()

    def _biases(self) -> Tensor:
        assert self.position_bias is not None
        return self.position_bias(self.config.window) * self.scale.abs()[:, None]

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout, self.training)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

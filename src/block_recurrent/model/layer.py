"""One layer of the stack: tokens up (SPEC sections 2, 3, 6 and 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.knn_memory import KNNMemory
from block_recurrent.model.memory import LayerMemory
from block_recurrent.nn.linear import apply_joined, constant, joined, linear
from block_recurrent.nn.mlp import MLP
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.nn.position import PositionBias
from block_recurrent.ops import (
    KeysValues,
    StateView,
    attend_each,
    dropout,
    merge_heads,
    split_heads,
    unit_heads,
    window_attention,
)


class TokenWeights(NamedTuple):
    """Weights of a layer for the input of attention, prepared once for all blocks of a call."""

    projection: Tensor | None
    """Maps to values, keys, queries and queries to the states; None if each map has a separate product."""
    scales: Tensor
    """Scales of all heads but those of values, (.., 1, 1)."""
    bias: Tensor
    """(H, W), multiplied by the head's scale."""


class Layer(nn.Module):
    """A pre-norm transformer layer with a sliding window; some also have a recurrent cell, or a kNN memory."""

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
        self.scale = constant(H, value=config.scale_init)
        self.position_bias = None if memorizing else PositionBias(H)
        self.to_state_queries = linear(D, HK) if self.reads_state else None
        self.state_scale = constant(H, value=config.scale_init) if self.reads_state else None
        self.recall_mix = constant(H, value=0.0) if memorizing else None
        self.cell = RecurrentCell(config) if number in config.recurrent_layers else None
        self.project = linear(2 * HK if self.reads_state else HK, D)
        self.mlp_norm = RMSNorm(D)
        self.mlp = MLP(D, config.mlp_dim)

    def forward(
        self,
        x: Tensor,
        memory: LayerMemory,
        grid: BlockGrid,
        view: StateView | None = None,
        weights: TokenWeights | None = None,
    ) -> tuple[Tensor, LayerMemory]:
        """x (B, N, D) -> x, and the next memory of the layer. `view`: the state to read in block feedback."""
        weights = weights or self.weights()
        queries, keys, values, state_queries = self._project_tokens(self._dropout(self.attention_norm(x)), weights)
        # The cache has the dtype of its keys; the state has that of the weights.
        keys = torch.cat([memory.keys.to(keys.dtype), keys], dim=2)
        values = torch.cat([memory.values.to(values.dtype), values], dim=2)
        fixed = 0 if memory.keys.requires_grad else memory.keys.shape[2]
        attention = window_attention(queries, keys, values, weights.bias, self._attention_dropout, fixed_keys=fixed)
        state, knn = memory.state, memory.knn
        if knn is not None:
            attention, knn = self._search(attention, queries, keys, values, knn, grid)
        read = [] if view is None else [(view.keys, view.values)]
        if self.cell is not None:
            read, state = self.cell.scan(memory.state, keys, values, grid, view)
        merged = merge_heads(attention)
        if read:
            merged = torch.cat([merged, merge_heads(self._read_states(state_queries, read, grid))], dim=2)
        x = x + self.project(merged)
        x = x + self._dropout(self.mlp(self.mlp_norm(x)))
        cached = memory.keys.shape[2]
        return x, LayerMemory(grid.newest(keys, cached), grid.newest(values, cached), state, knn)

    def weights(self) -> TokenWeights:
        """From the current parameters."""
        scale = self.scale.abs()
        scales = [torch.ones_like(scale), scale]
        if self.state_scale is not None:
            scales.append(self.state_scale.abs())
        return TokenWeights(joined(*self._maps()), torch.cat(scales).view(-1, 1, 1), self.bias(scale))

    def bias(self, scale: Tensor) -> Tensor:
        """(H, W): what is added to the logits of the W keys, the oldest first; `scale`: of the heads, not negative."""
        if self.position_bias is None:
            return scale.new_zeros(len(scale), self.config.window)
        return self.position_bias(self.config.window) * scale[:, None]

    def _maps(self) -> list[nn.Module]:
        maps = [self.to_values, self.to_keys, self.to_queries, self.to_state_queries]
        return [map for map in maps if map is not None]

    def _project_tokens(self, h: Tensor, weights: TokenWeights) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, N, D) -> queries, keys, values and queries to the states, (B, H, N, K) each."""
        maps = self._maps()
        heads = split_heads(apply_joined(h, weights.projection, *maps), len(maps) * self.config.num_heads)
        values, keys, queries, *rest = unit_heads(heads, weights.scales)
        return queries, keys, values, rest[0] if rest else None

    def _read_states(self, q: Tensor | None, read: list[KeysValues], grid: BlockGrid) -> Tensor:
        """Attention of each token to the state at the start of its block: (B, H, N, K)."""
        assert q is not None
        keys, values = [k for k, _ in read], [v for _, v in read]
        blocks = grid.into_blocks(q)
        found = attend_each(blocks.flatten(2, 3), keys, values, self._attention_dropout)
        return grid.out_of_blocks(found.view(blocks.shape))

    def _search(
        self, attention: Tensor, q: Tensor, keys: Tensor, values: Tensor, knn: KNNMemory, grid: BlockGrid
    ) -> tuple[Tensor, KNNMemory]:
        """Mix in attention to the kNN memory. A block's queries use the memory before the block."""
        assert self.recall_mix is not None
        W = grid.window
        new_keys, new_values = (grid.keys_of_completed(x, blocks_before=0) for x in (keys, values))
        found = []
        for block, q_block in enumerate(grid.into_blocks(q).unbind(2)):
            # q carries the head's scale, which is not negative and so does not change which keys are nearest.
            found.append(knn.attend(q_block, self.config.memory_neighbors))
            this = slice(block * W, (block + 1) * W)
            knn = knn.append(new_keys[:, :, this], new_values[:, :, this], [n > block for n in grid.completed])
        gate = self.recall_mix.sigmoid()[:, None, None].to(attention.dtype)
        return torch.lerp(attention, grid.out_of_blocks(torch.stack(found, dim=2)).to(attention.dtype), gate), knn

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout, self.training)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

"""One layer of the stack: tokens up (SPEC sections 2, 3, 6 and 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.cell import RecurrentCell, StateView
from block_recurrent.model.knn_memory import KNNMemory
from block_recurrent.model.memory import LayerMemory
from block_recurrent.nn.linear import apply_joined, constant, linear
from block_recurrent.nn.mlp import MLP
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.nn.position import PositionBias
from block_recurrent.ops import attend, dropout, merge_heads, split_heads, unit_heads, window_attention


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
        self, x: Tensor, memory: LayerMemory, grid: BlockGrid, view: StateView | None = None
    ) -> tuple[Tensor, LayerMemory]:
        """x (B, N, D) -> x, and what the layer remembers next. `view`: the state to read in block feedback."""
        queries, keys, values, state_queries = self._project_tokens(self._dropout(self.attention_norm(x)))
        keys, values = torch.cat([memory.keys, keys], dim=2), torch.cat([memory.values, values], dim=2)
        fixed = 0 if memory.keys.requires_grad else memory.keys.shape[2]
        attention = window_attention(queries, keys, values, self._bias(), self._attention_dropout, fixed_keys=fixed)
        state, knn = memory.state, memory.knn
        if knn is not None:
            attention, knn = self._search(attention, queries, keys, values, knn, grid)
        views = [] if view is None else [view]
        if self.cell is not None:
            views, state = self.cell.scan(memory.state, keys, values, grid, view)
        if views:
            attention = torch.cat([attention, self._read_states(state_queries, views, grid)], dim=1)
        x = x + self.project(merge_heads(attention))
        x = x + self._dropout(self.mlp(self.mlp_norm(x)))
        cached = memory.keys.shape[2]
        return x, LayerMemory(grid.newest(keys, cached), grid.newest(values, cached), state, knn)

    def _project_tokens(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, N, D) -> queries, keys, values and queries to the states, (B, H, N, K) each."""
        maps, scales = [self.to_values, self.to_keys, self.to_queries], [torch.ones_like(self.scale), self.scale.abs()]
        if self.to_state_queries is not None and self.state_scale is not None:
            maps.append(self.to_state_queries)
            scales.append(self.state_scale.abs())
        heads = split_heads(apply_joined(h, *maps), len(maps) * self.config.num_heads)
        values, keys, queries, *rest = unit_heads(heads, torch.cat(scales).view(-1, 1, 1))
        return queries, keys, values, rest[0] if rest else None

    def _bias(self) -> Tensor:
        """(H, W): what is added to the logits of the W keys, the oldest first. The head's scale is on it too."""
        if self.position_bias is None:
            return self.scale.new_zeros(len(self.scale), self.config.window)
        return self.position_bias(self.config.window) * self.scale.abs()[:, None]

    def _read_states(self, q: Tensor | None, views: list[StateView], grid: BlockGrid) -> Tensor:
        """Each token over the state as it was at the start of its block, one view per block: (B, H, N, K)."""
        assert q is not None
        if len(views) == 1:
            return attend(q, views[0].keys, views[0].values, self._attention_dropout)
        # Blocks are lanes of their own: (B * T, H, W or S, K).
        keys = torch.stack([view.keys for view in views], dim=1).flatten(0, 1)
        values = torch.stack([view.values for view in views], dim=1).flatten(0, 1)
        queries = grid.into_blocks(q).transpose(1, 2).flatten(0, 1)
        found = attend(queries, keys, values, self._attention_dropout).unflatten(0, (-1, len(views)))
        return grid.out_of_blocks(found.transpose(1, 2))

    def _search(
        self, attention: Tensor, q: Tensor, keys: Tensor, values: Tensor, knn: KNNMemory, grid: BlockGrid
    ) -> tuple[Tensor, KNNMemory]:
        """Mix in what the kNN memory holds. A block's queries see the memory as it was before the block."""
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

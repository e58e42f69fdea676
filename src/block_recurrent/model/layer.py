"""One layer of the stack: tokens up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.knn_memory import KNNMemory
from block_recurrent.model.memory import LayerMemory
from block_recurrent.nn.linear import MLP, apply_joined, constant, joined, linear
from block_recurrent.nn.norm import RMSNorm
from block_recurrent.nn.position import PositionBias
from block_recurrent.ops import (
    KeysValues,
    StateView,
    StateWeights,
    TokenHeads,
    add_dropout,
    attend_each,
    fan_out,
    merge_heads,
    residual_norm,
    split_heads,
    token_heads,
    window_attention,
)


class TokenWeights(NamedTuple):
    """Weights of a layer, prepared once for all blocks of a call."""

    projection: Tensor | None
    """Maps to values, keys, queries and queries to the states; None if each map has a separate product."""
    scales: Tensor
    """Scales of all heads but those of values, (.., 1, 1)."""
    bias: Tensor
    """(H, W), multiplied by the head's scale."""
    attention_norm: Tensor
    """(D,)"""
    mlp_norm: Tensor
    """(D,)"""
    state: StateWeights | None
    """Of the recurrent cell, if there is one."""

    def for_blocks(self, count: int) -> list[TokenWeights]:
        """The weights for each block. Gradients of large ones are added block by block, which takes less memory."""
        small = ("scales", "bias", "attention_norm", "mlp_norm")
        for_each = zip(*(fan_out(getattr(self, name), count) for name in small), strict=True)
        return [self._replace(**dict(zip(small, own, strict=True))) for own in for_each]


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
        x, h = residual_norm(x, weights.attention_norm, rate=self._dropout)
        tokens = self._project_tokens(h, memory, grid, weights)
        fixed = 0 if memory.keys.requires_grad else memory.keys.shape[2]
        attention = window_attention(
            tokens.queries, tokens.keys, tokens.values, weights.bias, self._attention_dropout, fixed_keys=fixed
        )
        state, knn = memory.state, memory.knn
        if knn is not None:
            attention, knn = self._search(attention, tokens, knn, grid)
        read = [] if view is None else [(view.keys, view.values)]
        if self.cell is not None and weights.state is not None:
            read, state = self.cell.scan(memory.state, tokens.keys, tokens.values, grid, weights.state, view)
        merged = merge_heads(attention)
        if read:
            merged = torch.cat([merged, merge_heads(self._read_states(tokens.state_queries, read, grid))], dim=2)
        x, h = residual_norm(x, weights.mlp_norm, self.project(merged))
        x = add_dropout(x, self.mlp(h), self._dropout)
        return x, LayerMemory(tokens.next_keys, tokens.next_values, state, knn)

    def weights(self) -> TokenWeights:
        """From the current parameters."""
        scale = self.scale.abs()
        scales = [torch.ones_like(scale), scale]
        if self.state_scale is not None:
            scales.append(self.state_scale.abs())
        return TokenWeights(
            projection=joined(*self._maps()),
            scales=torch.cat(scales).view(-1, 1, 1),
            bias=self.bias(scale),
            attention_norm=self.attention_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            state=None if self.cell is None else self.cell.weights(),
        )

    def bias(self, scale: Tensor) -> Tensor:
        """(H, W): what is added to the logits of the W keys, the oldest first; `scale`: of the heads, not negative."""
        if self.position_bias is None:
            return scale.new_zeros(len(scale), self.config.window)
        return self.position_bias(self.config.window) * scale[:, None]

    def _maps(self) -> list[nn.Module]:
        maps = [self.to_values, self.to_keys, self.to_queries, self.to_state_queries]
        return [map for map in maps if map is not None]

    def _project_tokens(self, h: Tensor, memory: LayerMemory, grid: BlockGrid, weights: TokenWeights) -> TokenHeads:
        """(B, N, D) -> queries, and keys and values after those in memory, in the dtype of products."""
        maps = self._maps()
        heads = split_heads(apply_joined(h, weights.projection, *maps), len(maps) * self.config.num_heads)
        return token_heads(heads, weights.scales, memory.values, memory.keys, grid.lengths)

    def _read_states(self, q: Tensor | None, read: list[KeysValues], grid: BlockGrid) -> Tensor:
        """Attention of each token to the state at the start of its block: (B, H, N, K)."""
        assert q is not None
        keys, values = [k for k, _ in read], [v for _, v in read]
        blocks = grid.into_blocks(q)
        found = attend_each(blocks.flatten(2, 3), keys, values, self._attention_dropout)
        return grid.out_of_blocks(found.view(blocks.shape))

    def _search(
        self, attention: Tensor, tokens: TokenHeads, knn: KNNMemory, grid: BlockGrid
    ) -> tuple[Tensor, KNNMemory]:
        """Mix in attention to the kNN memory. A block's queries use the memory before the block."""
        assert self.recall_mix is not None
        W = grid.window
        new_keys, new_values = (grid.keys_of_completed(x, blocks_before=0) for x in (tokens.keys, tokens.values))
        found = []
        for block, q_block in enumerate(grid.into_blocks(tokens.queries).unbind(2)):
            # Queries carry the head's scale, which is not negative and so does not change which keys are nearest.
            found.append(knn.attend(q_block, self.config.memory_neighbors))
            this = slice(block * W, (block + 1) * W)
            knn = knn.append(new_keys[:, :, this], new_values[:, :, this], [n > block for n in grid.completed])
        gate = self.recall_mix.sigmoid()[:, None, None].to(attention.dtype)
        return torch.lerp(attention, grid.out_of_blocks(torch.stack(found, dim=2)).to(attention.dtype), gate), knn

    @property
    def _dropout(self) -> float:
        return self.config.dropout if self.training else 0.0

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

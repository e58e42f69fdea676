"""One layer of the stack: tokens up (SPEC sections 2, 3, 6 and 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from block_recurrent.config import ModelConfig
from block_recurrent.model.blocks import BlockGrid
from block_recurrent.model.cell import KeysAndValues, RecurrentCell, StateView
from block_recurrent.model.memory import LayerMemory
from block_recurrent.model.recall import Recall
from block_recurrent.model.tape import extend
from block_recurrent.nn.attention import attend, merge_heads, one_query, split_heads, window_attention
from block_recurrent.nn.bare import adding, bare
from block_recurrent.nn.dropout import dropout
from block_recurrent.nn.kept import Kept
from block_recurrent.nn.linear import join, linear, ones, zeros
from block_recurrent.nn.mlp import MLP
from block_recurrent.nn.norm import RMSNorm, values_and_units
from block_recurrent.nn.position import PositionBias
from block_recurrent.nn.rows import AddTo, Function


class _Prepared(NamedTuple):
    """What a layer works out from its weights alone, in the order of use."""

    attention_norm: Function
    projection: Function
    """All maps of a token at once, D -> 3*H*K or 4*H*K."""
    scales: Tensor
    """Of the keys, which have none, of the queries, and of those to the states, (2H, 1, 1) or (3H, 1, 1)."""
    bias: Tensor
    """What is added to the logits of the W keys, the oldest first, (H, W); in writing (H, 1, W)."""
    add_projected: AddTo
    mlp_norm: Function
    add_mlp: AddTo


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
        self.to_state_queries = linear(D, HK) if self.reads_state else None
        self.state_scale = ones(H) if self.reads_state else None
        self.recall_mix = zeros(H) if memorizing else None
        self.cell = RecurrentCell(config) if number in config.recurrent_layers else None
        self.project = linear(2 * HK if self.reads_state else HK, D)
        self.mlp_norm = RMSNorm(D)
        self.mlp = MLP(D, config.mlp_dim)
        self._kept: Kept[_Prepared] = Kept()

    def forward(
        self, x: Tensor, memory: LayerMemory, grid: BlockGrid, view: StateView | None = None
    ) -> tuple[Tensor, LayerMemory]:
        """x (B, N, D) -> x, and what the layer remembers next. `view`: the state to read in block feedback.

        In writing x is (B, D), one token of each lane: every call counts, and calls on rows are shorter.
        """
        writing = x.ndim == 2
        prepared = self._kept.get(self._prepare_for_one_token, self) if writing else self._prepare()
        h = self._dropout(prepared.attention_norm(x))
        k, q, v, state_queries = self._project_tokens(h, prepared)
        extended = extend(memory.keys, memory.values, memory.place, k, v)
        if writing:  # a token doesn't see itself
            attention = one_query(q, memory.keys, memory.values, prepared.bias)
        else:
            fixed = 0 if memory.keys.requires_grad or memory.values.requires_grad else memory.keys.shape[2]
            attention = window_attention(q, *extended.all(), prepared.bias, self._attention_dropout, fixed_keys=fixed)
        state, recall, kept = memory.state, memory.recall, None
        if recall is not None:
            attention, recall = self._recall(attention, q, *extended.all(), recall, grid)
        if self.cell is not None:
            assert state is not None
            first = view or self.cell.kept_view(memory.view, state)
            views, state = self.cell.scan(state, KeysAndValues(*extended.all()), grid, first)
            attention = torch.cat([attention, self._read_states(state_queries, views, grid)], dim=1)
            if view is None and first is not None and state is memory.state:
                kept = memory.view  # as it was
            elif grid.all_in_last_block:
                kept = self.cell.keep(views[-1], state)
        elif view is not None:
            attention = torch.cat([attention, self._read_states(state_queries, [view], grid)], dim=1)
        x = prepared.add_projected(x, attention.flatten(1) if writing else merge_heads(attention))
        x = prepared.add_mlp(x, prepared.mlp_norm(x))
        if (place := extended.place) is not None and grid.all_full:
            return x, LayerMemory(place.keys, place.values, state, recall, place, kept)
        keys, values = (grid.newest(entries, memory.keys.shape[2]) for entries in extended.all())
        return x, LayerMemory(keys, values, state, recall, view=kept)

    def _prepare(self) -> _Prepared:
        scale = self.scale.abs()
        if self.position_bias is None:
            bias = scale.new_zeros(len(scale), self.config.window)
        else:
            bias = self.position_bias(self.config.window) * scale[:, None]  # the head's scale is on the bias too
        scales = [torch.ones_like(scale), scale, *([] if self.state_scale is None else [self.state_scale.abs()])]
        return _Prepared(
            self.attention_norm,
            join(*self._token_maps()),
            torch.cat(scales).view(-1, 1, 1),
            bias,
            lambda x, attention: x + self.project(attention),
            self.mlp_norm,
            lambda x, h: x + self._dropout(self.mlp(h)),
        )

    def _prepare_for_one_token(self) -> _Prepared:
        """The same in fewer calls, and kept from token to token: making it would take longer than the token itself."""
        prepared = self._prepare()
        return prepared._replace(
            attention_norm=bare(self.attention_norm),
            projection=join(*self._token_maps(), for_rows=True),
            bias=prepared.bias.unsqueeze(1).contiguous(),
            add_projected=adding(self.project),
            mlp_norm=bare(self.mlp_norm),
            add_mlp=adding(self.mlp),
        )

    def _token_maps(self) -> tuple[nn.Linear, ...]:
        """To all that a token shows and asks: values, keys, queries, and queries to the states where there are some."""
        maps = (self.to_values, self.to_keys, self.to_queries)
        return maps if self.to_state_queries is None else (*maps, self.to_state_queries)

    def _project_tokens(self, h: Tensor, prepared: _Prepared) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, N, D) -> keys, queries, values and queries to the states, (B, H, N, K) each."""
        heads = split_heads(prepared.projection(h), self.config.num_heads + prepared.scales.shape[0])
        values, keys, queries, *state_queries = values_and_units(heads, prepared.scales)
        return keys, queries, values, state_queries[0] if state_queries else None

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
            found.append(recall.attend(q_block, self.config.memory_neighbors))
            this = slice(block * W, (block + 1) * W)
            recall = recall.append(new_keys[:, :, this], new_values[:, :, this], [n > block for n in grid.completed])
        gate = self.recall_mix.sigmoid()[:, None, None].to(attention.dtype)
        recalled = grid.out_of_blocks(torch.stack(found, dim=2)).to(attention.dtype)
        return torch.lerp(attention, recalled, gate), recall

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout, self.training)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

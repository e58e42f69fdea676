"""Decodes and samples on a GPU: a token of every lane is a function of fixed shapes, on buffers that stay in place.

The host waits only for the chosen tokens. It counts the tokens of every lane itself and so knows when blocks end; the
device has the same positions as an index tensor. A CUDA graph could therefore contain `_token`, and another `_block`.
Caches are rings with one spare entry, so that the memory before the last token is intact too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.inference.sampling import REMEMBERED_TOKENS, Choice, Sampling, check_finite, shape_logits
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.snapshot import Snapshot
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.layer import Layer, TokenWeights
from block_recurrent.model.memory import DocumentMemory, LayerMemory
from block_recurrent.ops import (
    StateView,
    attend,
    merge_heads,
    on_device,
    rms_norm,
    split_heads,
    state_step,
    unit_heads,
)
from block_recurrent.ops.norm import at_least_float32
from block_recurrent.ops.precision import product_dtype

DRAWN_AT_ONCE = 64
"""Random numbers of a lane that are copied to the device together."""


class _Weights(NamedTuple):
    """A layer's weights, with matrices in the dtype of products."""

    layer: TokenWeights
    """Its bias by distance, from 1 on: (H, ring), minus infinity beyond the window."""
    project: Tensor
    hidden: Tensor
    output: Tensor
    cell: RecurrentCell | None


class _States(NamedTuple):
    """The states of a recurrent layer."""

    state: Tensor
    """(B, S, D)"""
    last: Tensor
    """Before the last end of a block."""
    view: StateView


class _Buffers(NamedTuple):
    """What a layer keeps of B lanes. Token number n is entry n % ring."""

    keys: Tensor
    """(B, H, ring, K)"""
    values: Tensor
    recurrent: _States | None


class DeviceDecoder:
    """The weights of a snapshot, prepared for decoding. `precision`: the context of all computation."""

    @staticmethod
    def fits(snapshot: Snapshot) -> bool:
        """Whether the model is supported; layers with a kNN memory are not."""
        return snapshot.device.type != "cpu" and snapshot.is_plain and not snapshot.config.memory_layers

    def __init__(self, snapshot: Snapshot, precision: Callable[[], AbstractContextManager[None]]) -> None:
        self.snapshot, self.config, self.precision = snapshot, snapshot.config, precision
        with precision():
            embedding = snapshot.model.embedding.weight
            self.dtype = product_dtype(embedding)
            self.table = embedding.to(self.dtype)
            self.layers = [self._weights(index, layer) for index, layer in enumerate(snapshot.model_layers())]
        highest = max(self.config.recurrent_layers, default=0) - 1
        self.readers = [
            (index if layer.cell is not None else highest) if self.config.layer_reads_state(index + 1) else None
            for index, layer in enumerate(self.layers)
        ]
        """The layer whose state each layer reads."""

    def _weights(self, index: int, layer: Layer) -> _Weights:
        prepared, packed = layer.weights(), self.snapshot.layers[index]
        joint, project, hidden, output = (matrix.widened(self.dtype) for matrix in packed)
        W, ring = self.config.window, self.config.window * (1 if layer.cell is None else 2) + 1
        bias = F.pad(prepared.bias.flip(1), (0, ring - W), value=-torch.inf)
        return _Weights(prepared._replace(projection=joint, bias=bias), project, hidden, output, layer.cell)


class DeviceWriting:
    """A generation of B lanes with the same sampling options, and a seed each."""

    def __init__(
        self,
        decoder: DeviceDecoder,
        states: Sequence[SessionState],
        samplings: Sequence[Sampling],
        eos_token_id: int,
    ) -> None:
        """The state of each lane, and its options: equal except for the seed."""
        memory = DocumentMemory.cat([state.memory for state in states])
        self.decoder, self.config, device = decoder, decoder.config, decoder.snapshot.device
        self.sampling, self.eos_token_id = samplings[0], eos_token_id
        self._counts: list[int] = memory.tokens_read.tolist()
        self._is_settled = True
        self._position = on_device(self._counts, device)
        self._tokens = on_device([state.pending for state in states], device)
        none = self.config.vocab_size  # the id of no token
        recent = [[none] * (REMEMBERED_TOKENS - len(state.recent)) + [*state.recent] for state in states]
        self._recent = on_device(torch.tensor(recent), device)
        self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self._generators = [torch.Generator().manual_seed(sampling.seed) for sampling in samplings]
        self._draws = torch.empty(memory.lanes, DRAWN_AT_ONCE, dtype=torch.float64, device=device)
        self._drawn = DRAWN_AT_ONCE
        with decoder.precision():
            memory = decoder.snapshot.model.ready(decoder.snapshot.recognized(memory), memory.lanes)
            self._layers = [self._buffers(*pair) for pair in zip(decoder.layers, memory.layers, strict=True)]

    def step(self) -> list[Choice]:
        """Feed the last token of each lane, and choose the next."""
        with self.decoder.precision():
            self._settle()
            if self._drawn == DRAWN_AT_ONCE and self.sampling.temperature > 0:
                numbers = [torch.rand(DRAWN_AT_ONCE, generator=g, dtype=torch.float64) for g in self._generators]
                self._draws.copy_(on_device(torch.stack(numbers), self._draws.device))
                self._drawn = 0
            chosen = self._token()
        self._drawn += 1
        self._counts = [count + 1 for count in self._counts]
        self._is_settled = False
        choices = [Choice(int(token), log_prob) for token, log_prob in chosen.cpu().tolist()]
        for choice in choices:
            check_finite(choice.log_prob)
        return choices

    def memory(self, lane: int, before: bool = False) -> DocumentMemory:
        """The memory of a lane after the token that was last fed, or before it."""
        with self.decoder.precision():
            if not before:
                self._settle()
            layers = tuple(self._copied(layer, lane, before) for layer in self._layers)
        tokens_read = torch.tensor([self._counts[lane] - before])
        return self.decoder.snapshot.signed(DocumentMemory(layers, tokens_read, self.config))

    def _copied(self, layer: _Buffers, lane: int, before: bool) -> LayerMemory:
        ring, this = layer.keys.shape[2], slice(lane, lane + 1)
        first = self._position[this, None] + (0 if before else 1)
        index = (first + torch.arange(ring - 1, device=first.device)) % ring
        keys, values = (_entries(x[this], index) for x in (layer.keys, layer.values))
        ended = before and self._is_settled and self._counts[lane] % self.config.window == 0
        if layer.recurrent is None:
            return LayerMemory(keys, values)
        return LayerMemory(keys, values, (layer.recurrent.last if ended else layer.recurrent.state)[this].clone())

    def _settle(self) -> None:
        """Compute the states of lanes whose block ended with the last token."""
        if not self._is_settled and any(count % self.config.window == 0 for count in self._counts):
            self._block()
        self._is_settled = True

    def _buffers(self, weights: _Weights, memory: LayerMemory) -> _Buffers:
        ring = weights.layer.bias.shape[1]
        index = (torch.arange(ring, device=self._position.device) - self._position[:, None]) % ring
        spare = (F.pad(x.to(self.decoder.dtype), (0, 0, 1, 0)) for x in (memory.keys, memory.values))
        keys, values = (_entries(x, index) for x in spare)
        if memory.state is None or weights.cell is None:
            return _Buffers(keys, values, None)
        view = StateView(*(x.clone() for x in weights.cell.view(memory.state, weights.layer.state)))
        return _Buffers(keys, values, _States(memory.state.clone(), memory.state.clone(), view))

    def _token(self) -> Tensor:
        """Feed `_tokens` and choose the next: (B, 2), token and log-probability. Fixed shapes, nothing read back."""
        model, decoder = self.decoder.snapshot.model, self.decoder
        x = model.embedding(self._tokens)[:, None]
        for weights, buffers, reader in zip(decoder.layers, self._layers, decoder.readers, strict=True):
            states = None if reader is None else self._layers[reader].recurrent
            x = self._layer(x, weights, buffers, states and states.view)
        hidden = model.final_norm(x)[:, 0] / math.sqrt(self.config.d_model)
        token, log_prob = self._choose(F.linear(hidden, decoder.table).double())
        self._recent.index_copy_(1, self._written % REMEMBERED_TOKENS, token[:, None])
        self._tokens.copy_(token)
        self._position.add_(1)
        self._written.add_(1)
        return torch.stack([token.double(), log_prob], dim=1)

    def _layer(self, x: Tensor, weights: _Weights, buffers: _Buffers, view: StateView | None) -> Tensor:
        """As `Layer.forward`, for one token (B, 1, D)."""
        ring, H = buffers.keys.shape[2], self.config.num_heads
        own = weights.layer
        joint = F.linear(rms_norm(x, own.attention_norm), cast(Tensor, own.projection))
        values, keys, queries, *state_queries = unit_heads(split_heads(joint, H + len(own.scales)), own.scales)
        distance = (self._position[:, None] - 1 - torch.arange(ring, device=x.device)) % ring
        logits = at_least_float32(queries @ buffers.keys.mT) + own.bias[:, distance].transpose(0, 1)[:, :, None]
        merged = merge_heads(logits.softmax(-1).to(buffers.values.dtype) @ buffers.values)
        place = (self._position % ring)[:, None, None, None].expand_as(keys)
        buffers.keys.scatter_(2, place, keys)
        buffers.values.scatter_(2, place, values)
        if view is not None:
            merged = torch.cat([merged, merge_heads(attend(state_queries[0], view.keys, view.values))], dim=2)
        x = x + F.linear(merged, weights.project)
        return x + F.linear(F.linear(rms_norm(x, own.mlp_norm), weights.hidden).relu(), weights.output)

    def _block(self) -> None:
        """The states of lanes that are at the end of a block. Fixed shapes, nothing read back."""
        W = self.config.window
        ended = (self._position % W == 0)[:, None, None]
        index = (self._position[:, None] - 2 * W + torch.arange(2 * W, device=ended.device)) % (2 * W + 1)
        for weights, (keys, values, recurrent) in zip(self.decoder.layers, self._layers, strict=True):
            if recurrent is None or weights.cell is None or weights.layer.state is None:
                continue
            state, last, view = recurrent
            tokens = [_entries(keys, index)], [_entries(values, index)]
            _, attention = state_step(state, weights.layer.state, *tokens, view)
            last.copy_(state)
            state.copy_(torch.where(ended, weights.cell.update(attention, state), state))
            for old, new in zip(view, weights.cell.view(state, weights.layer.state), strict=True):
                old.copy_(new)

    def _choose(self, plain: Tensor) -> tuple[Tensor, Tensor]:
        """As `Chooser.choose`, from logits (B, V) -> tokens and their log-probabilities, (B,)."""
        shaped = shape_logits(plain, self._recent, self.sampling, self.eos_token_id)
        if self.sampling.temperature == 0:
            token = shaped.argmax(-1)
        else:
            cumulative = shaped.softmax(-1).cumsum(-1)
            drawn = self._draws.index_select(1, self._written % DRAWN_AT_ONCE) * cumulative[:, -1:]
            found = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
            token = torch.minimum(found, cumulative.argmax(-1))
        return token, plain.gather(1, token[:, None])[:, 0] - plain.logsumexp(-1)


def _entries(x: Tensor, index: Tensor) -> Tensor:
    """From x (B, H, entries, K) those of each lane's index (B, n)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

"""One token of every lane through the whole stack, in one call of `ops/cpp/decode.c`.

A memory is a value, yet copying W keys and values of every layer for each token would cost more than attending to them.
So caches live in a `Buffer` with room at its end: a memory sees the entries before its place, and the next token is
written behind them, where no memory can see it yet. If another memory has written there already (a fork), or the buffer
is full, the entries are copied to a new one. A memory that comes from elsewhere is copied in first.
"""

from __future__ import annotations

import ctypes
import math
import threading
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.errors import InputError
from block_recurrent.inference.snapshot import Packed, Snapshot
from block_recurrent.model.memory import DocumentMemory, LayerMemory
from block_recurrent.ops import cpp

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
FEWEST_ROOM = 32


class Buffer:
    """Caches of B lanes: of plain layers with W entries each, and of recurrent ones with 2W; then room for more."""

    def __init__(self, stores: Sequence[Tensor]) -> None:
        self.stores = stores
        """Two, (keys and values of each layer, B, H, entries and room, K)."""
        self.written = 1
        """Tokens that were written into the room; the one for which the buffer is made is the first."""
        # Of each lane, for each store: where it begins, entries from keys to values, and from head to head.
        self.lanes = [
            [
                (x.data_ptr() + lane * x.stride(1) * x.element_size(), x.stride(0) // x.shape[4], x.shape[3])
                for x in stores
            ]
            for lane in range(stores[0].shape[1])
        ]


class Place(NamedTuple):
    """Where a memory lies: in a buffer, from entry `at` on; and its states with what they show and ask."""

    buffer: Buffer | None
    at: int
    states: tuple[Tensor, ...]
    """Of each recurrent layer, (B, S, D)."""
    views: tuple[Tensor, ...]
    """Of each lane, (recurrent layers, 4, H, S, K): keys, values, queries to the states and to the tokens."""


class NativeDecoder:
    """Decodes with the weights of a snapshot. Several threads may use one."""

    @staticmethod
    def fits(snapshot: Snapshot) -> bool:
        """Whether the kernel can do it; a layer that searches a memory it can't."""
        on_cpu = snapshot.device.type == "cpu" and snapshot.dtype == torch.float32
        return on_cpu and snapshot.is_plain and not snapshot.config.memory_layers and cpp.LIBRARY is not None

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.config = snapshot, snapshot.config
        recurrent = snapshot.config.recurrent_layers
        self.recurrent = [number - 1 for number in recurrent]
        self.plain = [i for i in range(snapshot.config.num_layers) if i not in self.recurrent]
        self.room = max(FEWEST_ROOM, self.config.window // 2)
        self.cells = [cell for layer in snapshot.model_layers() if (cell := layer.cell) is not None]
        self._places: WeakKeyDictionary[DocumentMemory, Place] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._scratch: list[Tensor] = []
        self._weights: list[Tensor] = []  # kept alive for the pointers below
        self._model = self._describe()
        assert cpp.LIBRARY is not None
        self._decode, self._room_for = cpp.LIBRARY.decode, cpp.LIBRARY.decode_room
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._decode.argtypes, self._decode.restype = (pointer, pointer, number, pointer, pointer, number), None
        self._room_for.argtypes, self._room_for.restype = (pointer, number, number), number

    def decode(self, tokens: Sequence[int], memories: Sequence[DocumentMemory]) -> tuple[Tensor, list[DocumentMemory]]:
        """A token for each lane of all memories together, each in the vocabulary."""
        claimed = [self._claim(memory) for memory in memories]
        lanes, W = array("q"), self.config.window
        ends = [(place.at + W, place.at + 2 * W) for _, place in claimed]
        given = iter(tokens)
        for (buffer, place), (plain_end, own_end) in zip(claimed, ends, strict=True):
            for (plain, own), view, token in zip(buffer.lanes, place.views, given, strict=False):
                lanes.extend((token, *plain, plain_end, *own, own_end, view.data_ptr()))
        logits = torch.empty(len(tokens), self.config.vocab_size)
        self._call(lanes, len(tokens), logits)
        return logits, [self._after(memory, *place) for memory, place in zip(memories, claimed, strict=True)]

    def _call(self, lanes: array[int], count: int, logits: Tensor) -> None:
        threads, model = torch.get_num_threads(), self._model.buffer_info()[0]
        needed = self._room_for(model, count, threads)
        # Not allocated anew for each token; two threads that decode at once have two.
        scratch = self._scratch.pop() if self._scratch else torch.empty(needed)
        scratch = scratch if len(scratch) >= needed else torch.empty(needed)
        self._decode(model, lanes.buffer_info()[0], count, logits.data_ptr(), scratch.data_ptr(), threads)
        self._scratch.append(scratch)

    def _claim(self, memory: DocumentMemory) -> tuple[Buffer, Place]:
        """A place for the memory, with room behind it that is this call's alone."""
        with self._lock:
            place = self._places.get(memory)
            if place and (buffer := place.buffer) and buffer.written == place.at < self.room:
                buffer.written += 1
                return buffer, place
        if place is None:
            place = self._enter(memory)
        buffer = Buffer([self._store(memory, self.plain, 1), self._store(memory, self.recurrent, 2)])
        return buffer, Place(buffer, 0, place.states, place.views)

    def _enter(self, memory: DocumentMemory) -> Place:
        """For a memory from elsewhere. The model checks it, and puts the initial state into lanes that are fresh."""
        made_here = memory.fingerprint == self.snapshot.fingerprint() and memory.config is self.config
        if not made_here or any(memory.fresh):
            no_tokens = torch.zeros(memory.lanes, 0, dtype=torch.int64)
            memory, given = self.snapshot.model.hidden(no_tokens, memory)[1], memory
        else:
            given = memory
        states = tuple(state for layer in memory.layers if (state := layer.state) is not None)
        views = [torch.stack(cell.view(state), 1) for cell, state in zip(self.cells, states, strict=True)]
        by_lane = torch.stack(views, 1).unbind() if views else (torch.empty(0),) * memory.lanes
        place = Place(None, 0, states, by_lane)
        with self._lock:
            self._places[given] = place
        return place

    def _store(self, memory: DocumentMemory, which: Sequence[int], windows: int) -> Tensor:
        c = self.config
        shape = (memory.lanes, c.num_heads, windows * c.window, c.head_dim)
        store = torch.empty(2 * len(which), *shape[:2], shape[2] + self.room, c.head_dim)
        entries = [x for i in which for x in (memory.layers[i].keys, memory.layers[i].values)]
        for x, to in zip(entries, store, strict=True):
            if tuple(x.shape) != shape:
                raise InputError(f"a layer of the memory has entries {tuple(x.shape)}: they must be {shape}")
            to[:, :, : shape[2]] = x
        return store

    def _after(self, memory: DocumentMemory, buffer: Buffer, place: Place) -> DocumentMemory:
        """The memory with the token that has just been written."""
        W, tokens_read = self.config.window, memory.tokens_read + 1
        place = place._replace(buffer=buffer, at=place.at + 1)
        plain, own = (x.narrow(3, place.at, n * W).unbind() for n, x in enumerate(buffer.stores, start=1))
        full = [lane for lane, count in enumerate(tokens_read.tolist()) if count % W == 0]
        if full and self.cells:
            place = self._next_block(place, own, full)
        layers = dict(zip(self.plain, map(LayerMemory, plain[::2], plain[1::2]), strict=True))
        layers.update(zip(self.recurrent, map(LayerMemory, own[::2], own[1::2], place.states), strict=True))
        in_order = tuple(layers[i] for i in range(len(layers)))
        after = DocumentMemory(in_order, tokens_read, self.config, fingerprint=self.snapshot.fingerprint())
        with self._lock:
            self._places[after] = place
        return after

    def _next_block(self, place: Place, entries: Sequence[Tensor], lanes: list[int]) -> Place:
        """Some lanes have completed a block: their states take it in. Once in W tokens, so torch does it."""
        states, views = list(place.states), list(place.views)
        for lane in lanes:
            views[lane] = views[lane].clone()
        for n, cell in enumerate(self.cells):
            keys, values, self_queries, token_queries = torch.stack([place.views[lane][n] for lane in lanes], 1)
            by_self = F.scaled_dot_product_attention(self_queries, keys, values, scale=1.0)
            keys, values = (x[lanes] for x in entries[2 * n : 2 * n + 2])
            by_tokens = F.scaled_dot_product_attention(token_queries, keys, values, scale=1.0)
            attention = torch.cat([by_self, by_tokens], 1).transpose(1, 2).flatten(2)
            state = cell.update(attention, states[n][lanes])
            states[n] = states[n].clone()
            states[n][lanes] = state
            for lane, view in zip(lanes, torch.stack(cell.view(state), 1), strict=True):
                views[lane][n] = view
        return place._replace(states=tuple(states), views=tuple(views))

    def _describe(self) -> array[int]:
        """`Model` in C."""
        c, model, snapshot = self.config, self.snapshot.model, self.snapshot
        D, H, HK, W = c.d_model, c.num_heads, c.num_heads * c.head_dim, c.window
        kind = _KINDS[snapshot.table.weight.dtype]
        numbers = [
            c.num_layers,
            D,
            H,
            c.head_dim,
            c.mlp_dim,
            W,
            c.num_states,
            c.vocab_size,
            kind,
            _KINDS[torch.float32],
        ]
        numbers += self._vector(model.embedding.weight, c.vocab_size, D)
        numbers += self._vector(model.final_norm.weight / math.sqrt(D), D) + self._matrix(
            snapshot.table, c.vocab_size, D
        )
        highest = len(self.recurrent) - 1
        for i, (layer, weights) in enumerate(zip(snapshot.model_layers(), snapshot.layers, strict=True)):
            scale, state_scale, reads = layer.scale.abs(), layer.state_scale, layer.state_scale is not None
            numbers += self._matrix(weights.joint, (3 + reads) * HK, D) + self._matrix(
                weights.project, D, (1 + reads) * HK
            )
            numbers += self._matrix(weights.hidden, c.mlp_dim, D) + self._matrix(weights.output, D, c.mlp_dim)
            numbers += self._vector(layer.attention_norm.weight, D) + self._vector(layer.mlp_norm.weight, D)
            assert layer.position_bias is not None
            numbers += self._vector(scale, H) + ([0] if state_scale is None else self._vector(state_scale.abs(), H))
            numbers += self._vector(layer.position_bias(W) * scale[:, None], H, W)
            own = i in self.recurrent
            index = (self.recurrent if own else self.plain).index(i)
            numbers += [int(own), index, -1 if not reads else index if own else highest]
        return array("q", numbers)

    def _vector(self, x: Tensor, *shape: int) -> list[int]:
        return self._pointer(x.detach().contiguous(), torch.float32, shape)

    def _matrix(self, packed: Packed, *shape: int) -> list[int]:
        scale = [0] if packed.scale is None else self._pointer(packed.scale, torch.float32, shape[:1])
        return self._pointer(packed.weight, self.snapshot.table.weight.dtype, shape) + scale

    def _pointer(self, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
        assert x.is_cpu
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert tuple(x.shape) == shape, f"{tuple(x.shape)} is not {shape}"
        self._weights.append(x)
        return [x.data_ptr()]

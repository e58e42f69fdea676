"""Decodes one token of every lane through the whole stack, in one call of `ops/cpp/decode.c`.

A memory is a value, but copying W keys and values of every layer for each token would cost more than attention.
So caches live in a `Buffer` with spare room at its end: a memory uses the entries before its position, and the next is
appended after them, where no memory reads yet. If another memory has already written there (a fork), or the buffer
is full, the entries are copied to a new one. Other memories are copied into a buffer first. Near the beginning of a
document most entries are 0: they are neither copied nor read.

With many lanes the caches dominate the memory traffic. So an entry of a head is stored with 24 bits per number and a
scale, exact to 2^-23 of its largest number, as in float32; with bfloat16 and int8 weights, with 16 bits per number.
"""

from __future__ import annotations

import ctypes
import math
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, cast, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.errors import InputError
from block_recurrent.inference.snapshot import Packed, Snapshot
from block_recurrent.model.memory import DocumentMemory, LayerMemory
from block_recurrent.ops import cpp

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
FEWEST_ROOM = 32


class Entries(NamedTuple):
    """Keys and values of some layers, as the kernel has them: `Numbers` in C."""

    high: Tensor
    """(keys and values of each layer, B, H, entries, K), int16."""
    low: Tensor
    """Eight further bits, uint8; none for each number with narrow weights."""
    scales: Tensor
    """(keys and values of each layer, B, H, entries), float32."""

    @classmethod
    def zeros(cls, shape: Sequence[int], low: bool) -> Entries:
        *outer, K = shape
        return cls(_zeros(shape, np.int16), _zeros((*outer, K * low), np.uint8), _zeros(outer, np.float32))

    def part(self, start: int, count: int) -> Entries:
        return Entries(*(x.narrow(3, start, count) for x in self))

    def widened(self, index: int) -> Tensor:
        """(B, H, entries, K), float32."""
        high, low, scales = (x[index].float() for x in self)
        return (torch.add(low, high, alpha=256) if low.shape[-1] else high) * scales.unsqueeze(-1)

    def pointers(self, lane: int = 0) -> tuple[int, ...]:
        """Where the numbers of a lane begin."""
        return tuple(x.data_ptr() + lane * x.stride(1) * x.element_size() for x in self)


class Buffer:
    """Caches of B lanes: of plain layers with W entries each, and of recurrent ones with 2W; then room for more."""

    def __init__(self, stores: Sequence[Entries], room: int) -> None:
        self.stores, self.room = stores, room
        """Two, each with the room after its entries."""
        self.written = 1
        """Number of tokens written into the room, including the one that the buffer was created for."""
        # Of each lane, for each store: where it begins, entries from keys to values, and from head to head.
        self.lanes = [
            [(*store.pointers(lane), store.scales.stride(0), store.scales.shape[3]) for store in stores]
            for lane in range(stores[0].scales.shape[1])
        ]


class Place(NamedTuple):
    """The location of a memory: a buffer, from entry `at` on; and its states with their keys, values and queries."""

    buffer: Buffer | None
    at: int
    states: tuple[Tensor, ...]
    """For each recurrent layer, (B, S, D)."""
    views: tuple[Tensor, ...]
    """For each lane, (recurrent layers, 4, H, S, K): keys, values, queries to the states and to the tokens."""
    shown: tuple[Entries, ...]
    """For each lane, those keys and values."""
    filled: tuple[int, ...]
    """For each lane, the number of newest entries that may be other than 0."""

    def entries(self, own: bool) -> Entries:
        """W of each plain layer, or 2W of each recurrent one."""
        buffer = cast(Buffer, self.buffer)
        store = buffer.stores[own]
        return store.part(self.at, store.scales.shape[3] - buffer.room)


class BufferedLayers(Sequence[LayerMemory]):
    """The layers of a memory, copied out of the buffer only when they are accessed; decoding does not."""

    def __init__(self, place: Place, recurrent: Sequence[int], count: int) -> None:
        self._place, self._recurrent, self._count = place, recurrent, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerMemory: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LayerMemory, ...]: ...
    def __getitem__(self, index: int | slice) -> LayerMemory | tuple[LayerMemory, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        own = index in self._recurrent
        number = self._recurrent.index(index) if own else index - sum(i < index for i in self._recurrent)
        keys, values = (self._place.entries(own).widened(2 * number + i) for i in range(2))
        return LayerMemory(keys, values, self._place.states[number] if own else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: the values without the spare room."""
        return tuple, ([layer.map(torch.clone, lambda knn: knn) for layer in self],)


class NativeDecoder:
    """Decodes with the weights of a snapshot. Thread-safe."""

    @staticmethod
    def fits(snapshot: Snapshot) -> bool:
        """Whether the kernel supports the model; layers with a kNN memory are not supported."""
        on_cpu = snapshot.device.type == "cpu" and snapshot.dtype == torch.float32
        return on_cpu and snapshot.is_plain and not snapshot.config.memory_layers and cpp.LIBRARY is not None

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.config = snapshot, snapshot.config
        self.recurrent = [number - 1 for number in snapshot.config.recurrent_layers]
        self.plain = [i for i in range(snapshot.config.num_layers) if i not in self.recurrent]
        self.room = max(FEWEST_ROOM, self.config.window // 2)
        self.exact = snapshot.weights == "float32"
        self.cells = [cell for layer in snapshot.model_layers() if (cell := layer.cell) is not None]
        self._places: WeakKeyDictionary[DocumentMemory, Place] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._scratch: list[Tensor] = []
        self._weights: list[Tensor] = []  # kept alive for the pointers below
        self._model = self._describe()
        names = ("decode", "decode_room", "decode_narrow")
        self._decode, self._room_for, self._narrow_all = (getattr(cpp.LIBRARY, name) for name in names)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._decode.argtypes, self._decode.restype = (pointer, pointer, number, pointer, pointer, number), None
        self._room_for.argtypes, self._room_for.restype = (pointer, number, number), number
        self._narrow_all.argtypes, self._narrow_all.restype = (number, *[pointer] * 2, *[number] * 6), number

    def decode(self, tokens: Sequence[int], memories: Sequence[DocumentMemory]) -> tuple[Tensor, list[DocumentMemory]]:
        """Decode a token for each lane of all memories together, each in the vocabulary.

        Results of a lane are bit-for-bit independent of the other lanes.
        """
        claimed = [self._claim(memory) for memory in memories]
        lanes, W = array("q"), self.config.window
        given = iter(tokens)
        for buffer, place in claimed:
            for (plain, own), shown, filled, token in zip(buffer.lanes, place.shown, place.filled, given, strict=False):
                lanes.extend((token, *plain, place.at + W, *own, place.at + 2 * W, *shown.pointers(), filled))
        logits = torch.empty(len(tokens), self.config.vocab_size)
        self._call(lanes, len(tokens), logits)
        return logits, [self._after(memory, place) for memory, (_, place) in zip(memories, claimed, strict=True)]

    def _call(self, lanes: array[int], count: int, logits: Tensor) -> None:
        threads, model = torch.get_num_threads(), self._model.buffer_info()[0]
        needed = self._room_for(model, count, threads)
        # Reused between tokens; concurrent threads have separate ones.
        scratch = self._scratch.pop() if self._scratch else torch.empty(needed)
        scratch = scratch if len(scratch) >= needed else torch.empty(needed)
        self._decode(model, lanes.buffer_info()[0], count, logits.data_ptr(), scratch.data_ptr(), threads)
        self._scratch.append(scratch)

    def _claim(self, memory: DocumentMemory) -> tuple[Buffer, Place]:
        """A location for the memory, with room after it that is reserved for this call."""
        with self._lock:
            place = self._places.get(memory)
            if place and (buffer := place.buffer) and buffer.written == place.at < self.room:
                buffer.written += 1
                return buffer, place
        if place is None:
            place = self._enter(memory)
        if place.buffer is None:
            buffer, place = self._narrowed(memory, place)
        else:
            buffer = self._copied(place)
        return buffer, place._replace(buffer=buffer, at=0)

    def _enter(self, memory: DocumentMemory) -> Place:
        """The states of a memory, ready for decoding. The model checks it, and sets the initial state of new lanes."""
        given = memory
        if memory.fingerprint != self.snapshot.fingerprint() or memory.config is not self.config or any(memory.fresh):
            memory = self.snapshot.model.ready(self.snapshot.recognized(memory), memory.lanes)
        states = tuple(state for layer in memory.layers if (state := layer.state) is not None)
        for state in states:
            self._check_shape(state, (memory.lanes, self.config.num_states, self.config.d_model), "a state")
        views = [torch.stack(cell.view(state), 1) for cell, state in zip(self.cells, states, strict=True)]
        by_lane = torch.stack(views, 1).unbind() if views else (torch.empty(0, 4, 1, 1, 1),) * memory.lanes
        place = Place(
            None, 0, states, by_lane, tuple(map(self._shown, by_lane)), (2 * self.config.window,) * memory.lanes
        )
        self._keep(given, place)
        return place

    def _narrowed(self, memory: DocumentMemory, place: Place) -> tuple[Buffer, Place]:
        """A buffer with the entries of a memory, and its place, from now on with their true number."""
        stores = [self._store(memory.lanes, own) for own in (False, True)]
        most = [0] * memory.lanes
        for own, store in enumerate(stores):
            shape = (memory.lanes, self.config.num_heads, (1 + own) * self.config.window, self.config.head_dim)
            for number, i in enumerate(self.recurrent if own else self.plain):
                for index, x in enumerate((memory.layers[i].keys, memory.layers[i].values), 2 * number):
                    self._check_shape(x, shape, "a cache")
                    for lane, filled in enumerate(place.filled):
                        to = Entries(*(part[index, lane] for part in store))
                        most[lane] = max(most[lane], self._narrow(x[lane], to, shape[2] - min(filled, shape[2])))
        self._keep(memory, place := place._replace(filled=tuple(most)))
        return Buffer(stores, self.room), place

    def _copied(self, place: Place) -> Buffer:
        """A buffer with the entries of another one."""
        stores = [self._store(len(place.filled), own) for own in (False, True)]
        for own, store in enumerate(stores):
            count = (1 + own) * self.config.window
            filled = min(count, max(place.filled))
            for to, x in zip(store.part(count - filled, filled), place.entries(bool(own)), strict=True):
                to.copy_(x.narrow(3, count - filled, filled))
        return Buffer(stores, self.room)

    def _store(self, lanes: int, own: bool) -> Entries:
        """For the entries of plain or of recurrent layers, with room after them."""
        c, layers = self.config, len(self.recurrent if own else self.plain)
        return Entries.zeros((2 * layers, lanes, c.num_heads, (1 + own) * c.window + self.room, c.head_dim), self.exact)

    def _shown(self, view: Tensor) -> Entries:
        """Keys and values of a lane's view, (recurrent layers, 4, H, S, K)."""
        keys_and_values = view[:, :2]
        shown = Entries.zeros(keys_and_values.shape, self.exact)
        self._narrow(keys_and_values, shown)
        return shown

    def _narrow(self, x: Tensor, to: Entries, first: int = 0) -> int:
        """x (..., entries, K), 0 before `first`, into the first of at least as many entries (..., entries, K), all 0.

        Returns the number of entries from the first one that is not 0.
        """
        x = x.detach().float().contiguous()
        *outer, entries, K = x.shape
        shape = (*outer, to.scales.shape[-1])
        pointers = (
            cpp.pointer(to.high, (*shape, K), torch.int16),
            cpp.pointer(to.low, (*shape, K * self.exact), torch.uint8),
            cpp.pointer(to.scales, shape),
        )
        numbers = array("q", cast(tuple[int, ...], pointers))
        sizes = math.prod(outer), first, entries, shape[-1], K
        return entries - self._narrow_all(
            self.exact, x.data_ptr(), numbers.buffer_info()[0], *sizes, torch.get_num_threads()
        )

    def _keep(self, memory: DocumentMemory, place: Place) -> None:
        with self._lock:
            self._places[memory] = place

    def _check_shape(self, x: Tensor, shape: tuple[int, ...], name: str) -> None:
        if tuple(x.shape) != shape:
            raise InputError(f"{name} of the memory has shape {tuple(x.shape)}: it must be {shape}")

    def _after(self, memory: DocumentMemory, place: Place) -> DocumentMemory:
        """The memory after the token that has just been written."""
        tokens_read = memory.tokens_read + 1
        most = 2 * self.config.window
        place = place._replace(at=place.at + 1, filled=tuple(min(most, count + 1) for count in place.filled))
        full = [lane for lane, count in enumerate(tokens_read.tolist()) if count % self.config.window == 0]
        if full and self.cells:
            place = self._next_block(place, full)
        layers = BufferedLayers(place, self.recurrent, self.config.num_layers)
        after = DocumentMemory(layers, tokens_read, self.config, fingerprint=self.snapshot.fingerprint())
        self._keep(after, place)
        return after

    def _next_block(self, place: Place, lanes: list[int]) -> Place:
        """Update the states of lanes that have completed a block. In torch, since it happens only every W tokens."""
        states, views, shown = list(place.states), list(place.views), list(place.shown)
        entries = place.entries(own=True)
        for lane in lanes:
            views[lane] = views[lane].clone()
        for n, cell in enumerate(self.cells):
            keys, values, self_queries, token_queries = torch.stack([place.views[lane][n] for lane in lanes], 1)
            by_self = F.scaled_dot_product_attention(self_queries, keys, values, scale=1.0)
            keys, values = (entries.widened(2 * n + i)[lanes] for i in range(2))
            by_tokens = F.scaled_dot_product_attention(token_queries, keys, values, scale=1.0)
            attention = torch.cat([by_self, by_tokens], 1).transpose(1, 2).flatten(2)
            state = cell.update(attention, states[n][lanes])
            states[n] = states[n].clone()
            states[n][lanes] = state
            for lane, view in zip(lanes, torch.stack(cell.view(state), 1), strict=True):
                views[lane][n] = view
        for lane in lanes:
            shown[lane] = self._shown(views[lane])
        return place._replace(states=tuple(states), views=tuple(views), shown=tuple(shown))

    def _describe(self) -> array[int]:
        """`Model` in C."""
        c, model, snapshot = self.config, self.snapshot.model, self.snapshot
        D, H, HK, W = c.d_model, c.num_heads, c.num_heads * c.head_dim, c.window
        numbers = [c.num_layers, D, H, c.head_dim, c.mlp_dim, W, c.num_states, c.vocab_size]
        numbers += [_KINDS[snapshot.table.weight.dtype], int(self.exact)]
        numbers += self._vector(model.embedding.weight, c.vocab_size, D)
        numbers += self._vector(model.final_norm.weight / math.sqrt(D), D)
        numbers += self._matrix(snapshot.table, c.vocab_size, D)
        highest = len(self.recurrent) - 1
        for i, (layer, weights) in enumerate(zip(snapshot.model_layers(), snapshot.layers, strict=True)):
            scale, state_scale, reads = layer.scale.abs(), layer.state_scale, layer.state_scale is not None
            numbers += self._matrix(weights.joint, (3 + reads) * HK, D)
            numbers += self._matrix(weights.project, D, (1 + reads) * HK)
            numbers += self._matrix(weights.hidden, c.mlp_dim, D) + self._matrix(weights.output, D, c.mlp_dim)
            numbers += self._vector(layer.attention_norm.weight, D) + self._vector(layer.mlp_norm.weight, D)
            numbers += self._vector(scale, H) + ([0] if state_scale is None else self._vector(state_scale.abs(), H))
            numbers += self._vector(layer.bias(layer.scale.abs()), H, W)
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
        self._weights.append(x)
        return [cast(int, cpp.pointer(x, shape, dtype))]


def _zeros(shape: Sequence[int], dtype: Any) -> Tensor:
    """Zeros that take no memory before they are written, beginning at a multiple of 64 bytes."""
    raw = np.zeros(math.prod(shape) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : len(raw) - 64 + start].view(dtype).reshape(shape))

"""The memory of a Memorizing Transformer layer: past keys and values, searched exactly (SPEC section 7).

`Recall` is a value, like every memory here, but a large one (half a GiB per lane at the paper's size), so values share
storage: a ring with some room to spare. Appending writes into the spare room, which no living value can see; when
there is none, or somebody else has written there, the new value gets a storage of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.nn.native import usable_for
from block_recurrent.nn.native.search import FEWEST_QUERIES, native_attend_found, native_search

# Scores of a search that are held at once: 64 MiB in float32, whatever the memory's size.
SCORES_AT_ONCE = 2**24
# Room to spare, at least, in appended blocks: so many successors can share storage with a value that is still in use.
SPARE_BLOCKS = 4


def room_to_spare(config: ModelConfig) -> int:
    """Entries: two segments. The backward pass reads what each block of a segment has seen, and a training loop may
    still hold the segment before.
    """
    blocks = max(SPARE_BLOCKS, 2 * config.segment // config.window)
    return blocks * min(config.window, config.memory_size)


class _Storage:
    """Keys and values (B, H, capacity, K), and up to where each lane has been written (positions only grow)."""

    def __init__(self, keys: Tensor, values: Tensor, written: list[int]) -> None:
        self.keys, self.values, self.written = keys, values, written
        self.users: weakref.WeakSet[Recall] = weakref.WeakSet()

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


class Recall:
    """The newest `size` entries of each lane: positions ends[b] - counts[b] up to ends[b] of the storage."""

    def __init__(self, storage: _Storage, size: int, ends: Sequence[int], counts: Sequence[int]) -> None:
        self._storage, self.size = storage, size
        self.ends, self.counts = tuple(ends), tuple(counts)
        storage.users.add(self)

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], spare: int, like: Tensor) -> Recall:
        """shape: (B, H, M, K). `spare`: so many entries can be appended while a value is in use; at least a block."""
        B, H, M, K = shape
        keys, values = (like.new_zeros(B, H, M + spare, K) for _ in range(2))
        return cls(_Storage(keys, values, [0] * B), M, [0] * B, [0] * B)

    @classmethod
    def from_tensors(
        cls, keys: Tensor, values: Tensor, counts: Sequence[int], spare: int, ends: Sequence[int] | None = None
    ) -> Recall:
        """The inverse of `tensors`. With the `ends` of the value that they came from, the new one has the same bits in
        all that it gives: a search returns entries in an order that hangs on where they are stored.
        """
        ends = counts if ends is None else ends
        fresh = cls.empty(tuple(keys.shape), spare, keys)  # type: ignore[arg-type]
        storage = fresh._storage
        for lane, (end, count) in enumerate(zip(ends, counts, strict=True)):
            slots = torch.arange(end - count, end, device=keys.device) % storage.capacity
            storage.keys[lane, :, slots] = keys[lane, :, :count]
            storage.values[lane, :, slots] = values[lane, :, :count]
        storage.written[:] = ends
        return cls(storage, fresh.size, ends, counts)

    @property
    def spare(self) -> int:
        """Entries that can be appended while this value is in use."""
        return self._storage.capacity - self.size

    @property
    def nbytes(self) -> int:
        """Bytes of what a value can hold; spare room is shared and not counted."""
        B, H, _, K = self._storage.keys.shape
        return 2 * B * H * self.size * K * self._storage.keys.element_size()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, M, K) in a layout of their own: oldest entry first, zeros where never written."""
        slots, written = self._slots_by_age()
        return tuple(  # type: ignore[return-value]
            _take_lanes(x, slots).masked_fill(~written[:, None, :, None], 0)
            for x in (self._storage.keys, self._storage.values)
        )

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Recall:
        keys, values = (x.to(device=device, dtype=dtype) for x in self.tensors())
        return Recall.from_tensors(keys, values, self.counts, self.spare, self.ends)

    def select(self, lanes: Sequence[int]) -> Recall:
        keys, values = (x[list(lanes)] for x in self.tensors())
        counts, ends = ([numbers[lane] for lane in lanes] for numbers in (self.counts, self.ends))
        return Recall.from_tensors(keys, values, counts, self.spare, ends)

    @staticmethod
    def cat(recalls: Sequence[Recall]) -> Recall:
        keys, values = (torch.cat(parts) for parts in zip(*(recall.tensors() for recall in recalls), strict=True))
        counts = [count for recall in recalls for count in recall.counts]
        ends = [end for recall in recalls for end in recall.ends]
        return Recall.from_tensors(keys, values, counts, recalls[0].spare, ends)

    def reset(self, lanes: Sequence[bool]) -> Recall:
        """Nothing remembered in the lanes that are marked."""
        if not any(lanes):
            return self
        counts = [0 if gone else count for gone, count in zip(lanes, self.counts, strict=True)]
        return Recall(self._storage, self.size, self.ends, counts)

    def append(self, keys: Tensor, values: Tensor, lanes: Sequence[bool]) -> Recall:
        """A value with a block of (B, H, W, K) more in the lanes that are marked; the oldest entries go."""
        if not any(lanes):
            return self
        keys, values = keys.detach()[:, :, -self.size :], values.detach()[:, :, -self.size :]
        length = keys.shape[2]
        ends = [end + length * more for end, more in zip(self.ends, lanes, strict=True)]
        if not self._may_write(ends, lanes):
            return Recall.from_tensors(*self.tensors(), self.counts, self.spare).append(keys, values, lanes)
        for lane in (lane for lane, more in enumerate(lanes) if more):
            slots = torch.arange(self.ends[lane], ends[lane], device=keys.device) % self._storage.capacity
            self._storage.keys[lane, :, slots] = keys[lane]
            self._storage.values[lane, :, slots] = values[lane]
            self._storage.written[lane] = ends[lane]
        counts = [min(count + length * more, self.size) for count, more in zip(self.counts, lanes, strict=True)]
        return Recall(self._storage, self.size, ends, counts)

    def _may_write(self, ends: list[int], lanes: Sequence[bool]) -> bool:
        """Whether writing up to `ends` touches nothing that this or any other living value sees."""
        storage = self._storage
        if storage.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False  # torch allows no writing to such tensors outside of inference mode
        if any(more and storage.written[lane] != self.ends[lane] for lane, more in enumerate(lanes)):
            return False
        oldest_kept = [end - storage.capacity for end in ends]
        return all(
            not more or user.counts[lane] == 0 or oldest_kept[lane] <= user.ends[lane] - user.counts[lane]
            for user in list(storage.users)
            for lane, more in enumerate(lanes)
        )

    def attend(self, queries: Tensor, neighbors: int) -> Tensor:
        """Each query (B, H, w, K) over the entries that `search` finds for it: (B, H, w, K)."""
        keys, values = self._storage.keys, self._storage.values
        if queries.shape[2] >= FEWEST_QUERIES and usable_for(queries) and usable_for(keys):
            scores, slots = native_search(queries, *self._searched(neighbors), neighbors)
            return native_attend_found(queries, keys, values, scores, slots, holder=self)
        keys, values = self.search(queries, neighbors)
        weights = torch.einsum("bhqk,bhqnk->bhqn", queries, keys).softmax(-1)
        return torch.einsum("bhqn,bhqnk->bhqk", weights, values)

    @torch.no_grad()
    def search(self, queries: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
        """For each query (B, H, w, K) the `neighbors` entries with the largest dot product, exactly.

        Returns their keys and values (B, H, w, n, K). An entry that was never written ranks last and comes as a zero
        key with a zero value.
        """
        scores, slots = _nearest(queries, *self._searched(neighbors), neighbors)
        keys, values = (_take_entries(x, slots) for x in (self._storage.keys, self._storage.values))
        if min(self.counts) < neighbors:
            written = (scores > float("-inf"))[..., None]
            keys, values = keys.mul_(written), values.mul_(written)
        return keys, values

    def _searched(self, neighbors: int) -> tuple[Tensor, Tensor]:
        """Keys (B, H, used, K) of the part of the storage that was ever written, and which of them (B, used) count."""
        used = max(min(max(self.ends), self._storage.capacity), neighbors)
        keys = self._storage.keys[:, :, :used]
        return keys, self._visible(used, keys.device)

    def _visible(self, used: int, device: torch.device) -> Tensor:
        """(B, used): the storage slots that hold one of this value's entries."""
        ends, counts = (torch.tensor(x, device=device)[:, None] for x in (self.ends, self.counts))
        age = (ends - 1 - torch.arange(used, device=device)) % self._storage.capacity
        return age < counts

    def _slots_by_age(self) -> tuple[Tensor, Tensor]:
        """(B, M): storage slot of each entry, oldest first, and whether there is one."""
        device = self._storage.keys.device
        ends, counts = (torch.tensor(x, device=device)[:, None] for x in (self.ends, self.counts))
        rank = torch.arange(self.size, device=device)
        return (ends - counts + rank) % self._storage.capacity, rank < counts


def _nearest(queries: Tensor, keys: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """As `native_search`, by torch: the scores of a chunk of keys at a time."""
    B, H, w, _ = queries.shape
    chunk = max(neighbors, SCORES_AT_ONCE // max(1, B * H * w))
    best_scores = queries.new_empty(B, H, w, 0)
    best_slots = torch.empty(B, H, w, 0, dtype=torch.int64, device=queries.device)
    for first in range(0, keys.shape[2], chunk):
        scores = queries @ keys[:, :, first : first + chunk].transpose(-1, -2)
        scores.masked_fill_(~visible[:, None, None, first : first + chunk], float("-inf"))
        top = scores.topk(min(neighbors, scores.shape[-1]), sorted=False)
        best_scores = torch.cat([best_scores, top.values], dim=-1)
        best_slots = torch.cat([best_slots, top.indices + first], dim=-1)
        if best_scores.shape[-1] > neighbors:
            kept = best_scores.topk(neighbors, sorted=False)
            best_scores, best_slots = kept.values, best_slots.gather(-1, kept.indices)
    return best_scores, best_slots


def _take_lanes(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, H, C, K) at slots (B, M) -> (B, H, M, K)."""
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _take_entries(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, H, C, K) at slots (B, H, w, n) -> (B, H, w, n, K)."""
    B, H, C, K = x.shape
    base = torch.arange(B * H, device=x.device).view(B, H, 1, 1) * C
    return torch.nn.functional.embedding(slots + base, x.reshape(B * H * C, K))

"""The kNN memory of a Memorizing Transformer layer: past keys and values, searched exactly.

`KNNMemory` is a value, like every memory here, but a large one (half a GiB per lane at the paper's size), so values
share storage: a ring buffer with spare room. Appending writes into the spare room, which no live value uses; if
there is none, or another value has written there, the new value gets its own storage.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.ops import knn_attend, on_device

# Minimum spare room, in appended blocks: this many successors can share storage with a value that is still in use.
SPARE_BLOCKS = 4


def room_to_spare(config: ModelConfig) -> int:
    """Entries: two segments. The backward pass reads what each block of a segment has used, and a training loop may
    still use the segment before.
    """
    blocks = max(SPARE_BLOCKS, 2 * config.segment // config.window)
    return blocks * min(config.window, config.memory_size)


class _Storage:
    """Keys and values (B, H, capacity, K), and up to where each lane has been written (positions only grow)."""

    def __init__(self, keys: Tensor, values: Tensor, written: list[int]) -> None:
        self.keys, self.values, self.written = keys, values, written
        self.users: weakref.WeakSet[KNNMemory] = weakref.WeakSet()
        self.lock = threading.Lock()

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


class KNNMemory:
    """The newest `size` entries of each lane: positions ends[b] - counts[b] up to ends[b] of the storage."""

    def __init__(self, storage: _Storage, size: int, ends: Sequence[int], counts: Sequence[int]) -> None:
        self._storage, self.size = storage, size
        self.ends, self.counts = tuple(ends), tuple(counts)
        storage.users.add(self)

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], spare: int, like: Tensor) -> KNNMemory:
        """shape: (B, H, M, K). `spare`: entries that can be appended while a value is in use; at least a block."""
        B, H, M, K = shape
        keys, values = (like.new_zeros(B, H, M + spare, K) for _ in range(2))
        return cls(_Storage(keys, values, [0] * B), M, [0] * B, [0] * B)

    @classmethod
    def from_tensors(
        cls, keys: Tensor, values: Tensor, counts: Sequence[int], spare: int, ends: Sequence[int] | None = None
    ) -> KNNMemory:
        """The inverse of `tensors`. With the `ends` of the original, results of the new value are identical bit for
        bit: the order of entries in a search depends on where they are stored.
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
        """Number of entries that can be appended while this value is in use."""
        return self._storage.capacity - self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the capacity of a value; spare room is shared and not counted."""
        B, H, _, K = self._storage.keys.shape
        return 2 * B * H * self.size * K * self._storage.keys.element_size()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, M, K) as copies: oldest entry first, zeros where never written."""
        slots, written = self._slots_by_age()
        return tuple(  # type: ignore[return-value]
            _take_lanes(x, slots).masked_fill(~written[:, None, :, None], 0)
            for x in (self._storage.keys, self._storage.values)
        )

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> KNNMemory:
        keys, values = (x.to(device=device, dtype=dtype) for x in self.tensors())
        return KNNMemory.from_tensors(keys, values, self.counts, self.spare, self.ends)

    def select(self, lanes: Sequence[int]) -> KNNMemory:
        keys, values = (x[list(lanes)] for x in self.tensors())
        counts, ends = ([numbers[lane] for lane in lanes] for numbers in (self.counts, self.ends))
        return KNNMemory.from_tensors(keys, values, counts, self.spare, ends)

    @staticmethod
    def cat(memories: Sequence[KNNMemory]) -> KNNMemory:
        keys, values = (torch.cat(parts) for parts in zip(*(one.tensors() for one in memories), strict=True))
        counts = [count for one in memories for count in one.counts]
        ends = [end for one in memories for end in one.ends]
        return KNNMemory.from_tensors(keys, values, counts, memories[0].spare, ends)

    def reset(self, lanes: Sequence[bool]) -> KNNMemory:
        """Clear the marked lanes."""
        if not any(lanes):
            return self
        counts = [0 if gone else count for gone, count in zip(lanes, self.counts, strict=True)]
        return KNNMemory(self._storage, self.size, self.ends, counts)

    def append(self, keys: Tensor, values: Tensor, lanes: Sequence[bool]) -> KNNMemory:
        """Append a block of (B, H, W, K) in the marked lanes; the oldest entries are dropped."""
        if not any(lanes):
            return self
        keys, values = keys.detach()[:, :, -self.size :], values.detach()[:, :, -self.size :]
        length = keys.shape[2]
        ends = [end + length * more for end, more in zip(self.ends, lanes, strict=True)]
        with self._storage.lock:  # forks may append at the same time: one of them gets the room
            if self._may_write(ends, lanes):
                self._write(keys, values, ends, lanes)
                counts = [min(count + length * more, self.size) for count, more in zip(self.counts, lanes, strict=True)]
                return KNNMemory(self._storage, self.size, ends, counts)
        return KNNMemory.from_tensors(*self.tensors(), self.counts, self.spare).append(keys, values, lanes)

    def _write(self, keys: Tensor, values: Tensor, ends: list[int], lanes: Sequence[bool]) -> None:
        # Through `.data`: the backward pass of earlier blocks uses other entries of the storage.
        all_keys, all_values = self._storage.keys.data, self._storage.values.data
        for lane in (lane for lane, more in enumerate(lanes) if more):
            slots = torch.arange(self.ends[lane], ends[lane], device=keys.device) % self._storage.capacity
            all_keys[lane, :, slots] = keys[lane].to(all_keys.dtype)
            all_values[lane, :, slots] = values[lane].to(all_keys.dtype)
            self._storage.written[lane] = ends[lane]

    def _may_write(self, ends: list[int], lanes: Sequence[bool]) -> bool:
        """Whether an append up to `ends` affects neither this nor any other live value."""
        storage = self._storage
        if storage.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False  # outside inference mode, torch does not allow changes of such tensors
        if any(more and storage.written[lane] != self.ends[lane] for lane, more in enumerate(lanes)):
            return False
        oldest_kept = [end - storage.capacity for end in ends]
        return all(
            not more or user.counts[lane] == 0 or oldest_kept[lane] <= user.ends[lane] - user.counts[lane]
            for user in list(storage.users)
            for lane, more in enumerate(lanes)
        )

    def attend(self, queries: Tensor, neighbors: int) -> Tensor:
        """Each query (B, H, w, K) over the entries with the largest dot product, searched exactly: (B, H, w, K).

        Where there are fewer entries than `neighbors`, the others are zero keys with zero values.
        """
        out = knn_attend(queries, *self.searched(neighbors), neighbors)
        if out.grad_fn is not None:
            # The backward pass reads the entries again: until then they must not be overwritten.
            out.grad_fn.metadata["entries"] = self  # type: ignore[index]
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles contain only the entries, not the shared room."""
        return KNNMemory.from_tensors, (*self.tensors(), self.counts, self.spare, self.ends)

    def searched(self, least: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, H, used, K) of the part of the storage that has been written, at least some entries,
        and which of them (B, used) belong to this value."""
        used = max(min(max(self.ends), self._storage.capacity), least)
        keys, values = self._storage.keys[:, :, :used], self._storage.values[:, :, :used]
        return keys, values, self._visible(used, keys.device)

    def _visible(self, used: int, device: torch.device) -> Tensor:
        """(B, used): the storage slots of this value's entries."""
        ends, counts = (on_device(x, device)[:, None] for x in (self.ends, self.counts))
        age = (ends - 1 - torch.arange(used, device=device)) % self._storage.capacity
        return age < counts

    def _slots_by_age(self) -> tuple[Tensor, Tensor]:
        """(B, M): storage slot of each entry, oldest first, and whether there is one."""
        device = self._storage.keys.device
        ends, counts = (on_device(x, device)[:, None] for x in (self.ends, self.counts))
        rank = torch.arange(self.size, device=device)
        return (ends - counts + rank) % self._storage.capacity, rank < counts


def _take_lanes(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, H, C, K) at slots (B, M) -> (B, H, M, K)."""
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

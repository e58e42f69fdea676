"""The positions of the tokens of a call in the blocks of their lanes.

A call may have any number of tokens, and lanes may be at different positions inside their open block. Everything that
depends on block boundaries goes through `BlockGrid`; with whole blocks (training) its methods are views, not copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import on_device


def slice_lanes(x: Tensor, starts: Sequence[int], length: int, dim: int) -> Tensor:
    """From each lane b the `length` entries that begin at starts[b] along `dim`; zeros out of bounds."""
    size = x.shape[dim]
    if len(set(starts)) == 1:
        start, end = starts[0], starts[0] + length
        inside = x.narrow(dim, min(max(start, 0), size), max(min(end, size) - max(start, 0), 0))
        if inside.shape[dim] == length:
            return inside
        before = min(max(-start, 0), length)
        after = length - before - inside.shape[dim]
        return F.pad(inside, (0, 0) * (x.ndim - 1 - dim) + (before, after))
    index = on_device(starts, x.device)[:, None] + torch.arange(length, device=x.device)
    shape = [x.shape[0]] + [1] * (x.ndim - 1)
    shape[dim] = length
    outside = ((index < 0) | (index >= size)).view(shape)
    index = index.clamp(0, max(size - 1, 0)).view(shape).expand(*x.shape[:dim], length, *x.shape[dim + 1 :])
    return x.gather(dim, index).masked_fill(outside, 0)


@dataclass(frozen=True)
class BlockGrid:
    """B lanes; lane b has read offsets[b] tokens of its open block and gets lengths[b] of the call's N tokens."""

    window: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        """T: blocks that the longest lane touches, at least one."""
        ends = (offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))
        return max(1, *(-(-end // self.window) for end in ends))

    @property
    def completed(self) -> tuple[int, ...]:
        """Blocks that each lane completes."""
        return tuple((p + n) // self.window for p, n in zip(self.offsets, self.lengths, strict=True))

    @property
    def most_completed(self) -> int:
        return max(self.completed)

    def into_blocks(self, x: Tensor) -> Tensor:
        """(B, H, N, K) -> (B, H, T, W, K), each token in its block; with one block, no more rows than tokens."""
        if self.num_blocks == 1:
            return x.unsqueeze(2)
        rows = slice_lanes(x, [-p for p in self.offsets], self.num_blocks * self.window, dim=2)
        return rows.unflatten(2, (self.num_blocks, self.window))

    def out_of_blocks(self, x: Tensor) -> Tensor:
        """The inverse of `into_blocks`."""
        if self.num_blocks == 1:
            return x.squeeze(2)
        return slice_lanes(x.flatten(2, 3), self.offsets, self.num_tokens, dim=2)

    def keys_of_completed(self, buffer: Tensor, blocks_before: int) -> Tensor:
        """The keys of the blocks completed in this call, and of some blocks before them.

        buffer (B, H, C + N, K): the cached keys, then the call's. Returns (B, H, blocks * W, K), where blocks is
        blocks_before + most_completed; lanes that complete fewer end in zeros or in keys of their open block.
        """
        cached = buffer.shape[2] - self.num_tokens
        starts = [cached - p - blocks_before * self.window for p in self.offsets]
        return slice_lanes(buffer, starts, (blocks_before + self.most_completed) * self.window, dim=2)

    def newest(self, buffer: Tensor, count: int) -> Tensor:
        """The last `count` real entries of each lane in a buffer (B, H, C + N, K)."""
        cached = buffer.shape[2] - self.num_tokens
        return slice_lanes(buffer, [cached + n - count for n in self.lengths], count, dim=2)

    def pieces(self) -> list[tuple[list[int], list[int]]]:
        """Divide the call at block boundaries: for each block, the first token and the number of tokens per lane."""
        cuts = [
            [min(max(block * self.window - p, 0), n) for p, n in zip(self.offsets, self.lengths, strict=True)]
            for block in range(self.num_blocks + 1)
        ]
        return [(first, [e - s for s, e in zip(first, last, strict=True)]) for first, last in itertools.pairwise(cuts)]

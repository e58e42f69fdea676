"""The positions of the tokens of a call in the blocks of their lanes.

A call may have any number of tokens, and lanes may be at different positions inside their open block. Everything that
depends on block boundaries goes through `BlockGrid`; with whole blocks (training) its methods are views, not copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from block_recurrent.ops import on_device, slice_lanes


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

    def pieces(self) -> list[Piece]:
        """Divide the call at block boundaries."""
        cuts = [
            [min(max(block * self.window - p, 0), n) for p, n in zip(self.offsets, self.lengths, strict=True)]
            for block in range(self.num_blocks + 1)
        ]
        found = []
        for first, end in itertools.pairwise(cuts):
            offsets = tuple((p + f) % self.window for p, f in zip(self.offsets, first, strict=True))
            lengths = tuple(e - f for f, e in zip(first, end, strict=True))
            found.append(Piece(first, BlockGrid(self.window, offsets, lengths, max(lengths))))
        return found

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `Piece.of` for all pieces: (B, n, D) each -> (B, N, D); zeros behind a lane's real tokens."""
        if len(set(self.offsets)) == len(set(self.lengths)) == 1 and self.lengths[0] == self.num_tokens:
            return torch.cat(list(parts), dim=1)  # all lanes are at the same position
        placed = (piece.placed(x, self) for piece, x in zip(self.pieces(), parts, strict=True))
        return functools.reduce(torch.add, placed)  # one after the other: all of them would take T times the memory


@dataclass(frozen=True)
class Piece:
    """The tokens of a call in one block: those from `first` of each lane on, on a grid of their own."""

    first: list[int]
    grid: BlockGrid

    def of(self, x: Tensor) -> Tensor:
        """(B, N, D), of the call -> (B, n, D)."""
        return slice_lanes(x, self.first, self.grid.num_tokens, dim=1)

    def placed(self, x: Tensor, call: BlockGrid) -> Tensor:
        """(B, n, D) -> (B, N, D): zeros where the piece has no token."""
        real = is_real(self.grid.lengths, x.shape[1], x.device)
        return slice_lanes(x * real[..., None], [-start for start in self.first], call.num_tokens, dim=1)


def is_real(lengths: Sequence[int], num_tokens: int, device: torch.device) -> Tensor:
    """(B, N): whether a position is one of the first lengths[b] of its lane."""
    if min(lengths) == num_tokens:
        return torch.ones(len(lengths), num_tokens, dtype=torch.bool, device=device)
    return torch.arange(num_tokens, device=device) < on_device(lengths, device)[:, None]

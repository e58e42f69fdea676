"""T5's relative position bias, unidirectional: a learned number per head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from block_recurrent.nn.linear import normal
from block_recurrent.ops import on_device

NUM_BUCKETS = 32
MAX_DISTANCE = 128


def bucket_of(distance: int) -> int:
    """Half of the buckets are exact distances; the others grow by a constant factor up to MAX_DISTANCE, then one."""
    exact = NUM_BUCKETS // 2
    if distance < exact:
        return max(distance, 0)
    share = math.log(distance / exact) / math.log(MAX_DISTANCE / exact)
    return min(exact + int(share * (NUM_BUCKETS - exact)), NUM_BUCKETS - 1)


_BUCKETS = torch.tensor([bucket_of(distance) for distance in range(MAX_DISTANCE, 0, -1)])


class PositionBias(nn.Module):
    """The bias of every distance in a window."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.table = normal(num_heads, NUM_BUCKETS, deviation=math.sqrt(1 / NUM_BUCKETS))

    def forward(self, window: int) -> Tensor:
        """(H, W): the bias at distances W to 1: of the oldest key first."""
        near = self.table[:, on_device(_BUCKETS[-window:], self.table.device)]
        if window <= MAX_DISTANCE:
            return near
        return torch.cat([near[:, :1].expand(-1, window - MAX_DISTANCE), near], dim=1)

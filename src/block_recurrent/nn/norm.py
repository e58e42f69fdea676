"""The norm before attention, before the MLP, and before the logits."""

from __future__ import annotations

from torch import Tensor, nn

from block_recurrent.nn.linear import constant
from block_recurrent.ops import rms_norm


class RMSNorm(nn.Module):
    """Scale only: no mean, no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = constant(width, value=1.0)

    def forward(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        return rms_norm(x, self.weight, dropout)

"""Normalisation: of embeddings by their root mean square, of keys and queries by their length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from block_recurrent.nn.linear import ones

EPSILON = 1e-6


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision goes up to float32; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class RMSNorm(nn.Module):
    """Scale only: no mean, no bias. Computed in float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = ones(width)

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return nn.functional.rms_norm(wide, self.weight.shape, at_least_float32(self.weight), EPSILON).to(x.dtype)


def unit_length(x: Tensor) -> Tensor:
    """x over its L2 norm along the last axis, as keys and queries are (SPEC section 2)."""
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)

"""Linear maps without bias, and the initial values of all weights (SPEC section 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Standard deviation of a unit normal that is cut at two deviations: what `trunc_normal_` loses is given back.
_DEVIATION_AFTER_CUT = 0.87962566103423978


def linear(in_dim: int, out_dim: int, variance: float = 1.0) -> nn.Linear:
    """A linear map without bias; its weights have `variance / in_dim`, cut at two deviations."""
    layer = nn.Linear(in_dim, out_dim, bias=False)
    deviation = math.sqrt(variance / in_dim) / _DEVIATION_AFTER_CUT
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    return layer


def apply_joined(x: Tensor, *maps: nn.Module) -> Tensor:
    """Several maps of one x, (..., in) -> (..., outputs of all): one product, though they are separate parameters."""
    weights = [map.weight for map in maps if type(map) is nn.Linear]
    if len(weights) == len(maps):
        return F.linear(x, torch.cat(weights))
    return torch.cat([map(x) for map in maps], dim=-1)  # modules with products of their own, such as 8-bit weights


def normal(*shape: int, deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution."""
    return nn.Parameter(torch.empty(shape).normal_(std=deviation))


def constant(*shape: int, value: float) -> nn.Parameter:
    """A parameter whose entries all start at one value."""
    return nn.Parameter(torch.full(shape, float(value)))

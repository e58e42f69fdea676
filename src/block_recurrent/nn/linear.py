"""Linear maps without bias, and the initial values of all weights (SPEC section 5)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from block_recurrent.nn.rows import Function, times

# Standard deviation of a unit normal that is cut at two deviations: what `trunc_normal_` loses is given back.
_DEVIATION_AFTER_CUT = 0.87962566103423978


def linear(in_dim: int, out_dim: int, variance: float = 1.0) -> nn.Linear:
    """A linear map without bias; its weights have `variance / in_dim`, cut at two deviations."""
    layer = nn.Linear(in_dim, out_dim, bias=False)
    deviation = math.sqrt(variance / in_dim) / _DEVIATION_AFTER_CUT
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    return layer


def join(*maps: nn.Linear, for_rows: bool = False) -> Function:
    """Several maps, which stay separate parameters (SPEC section 8), as one: (..., in) -> (..., outputs of all).

    `for_rows`: shorter for (tokens, in), and of no use for anything else.
    """
    if all(type(map) is nn.Linear for map in maps):
        weight = torch.cat([map.weight for map in maps])
        return times(weight, copy=True) if for_rows else partial(F.linear, weight=weight)
    return lambda x: torch.cat([map(x) for map in maps], dim=-1)  # they have products of their own, as in 8 bits


def normal(*shape: int, deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution."""
    return nn.Parameter(torch.empty(shape).normal_(std=deviation))


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))

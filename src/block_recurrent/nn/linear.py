"""Linear maps without bias, the MLP of two of them, and the initial values of all weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from block_recurrent.ops.precision import product_dtype

# Standard deviation of a unit normal truncated at two deviations, to correct for `trunc_normal_`.
_DEVIATION_AFTER_CUT = 0.87962566103423978


def linear(in_dim: int, out_dim: int, variance: float = 1.0) -> nn.Linear:
    """A linear map without bias; its weights have `variance / in_dim`, truncated at two deviations."""
    layer = nn.Linear(in_dim, out_dim, bias=False)
    deviation = math.sqrt(variance / in_dim) / _DEVIATION_AFTER_CUT
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    return layer


def joined(*maps: nn.Module) -> Tensor | None:
    """The weights of several maps as one, in the dtype of products; None if one has its own products (8 bits)."""
    if any(type(map) is not nn.Linear for map in maps):
        return None
    weight = torch.cat([map.weight for map in maps])  # type: ignore[misc]
    return weight.to(product_dtype(weight))


def apply_joined(x: Tensor, weight: Tensor | None, *maps: nn.Module) -> Tensor:
    """Several maps of one x, (..., in) -> (..., outputs of all): one product if `joined` merged them."""
    return torch.cat([map(x) for map in maps], dim=-1) if weight is None else F.linear(x, weight)


class MLP(nn.Module):
    """relu(x W1) W2."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.hidden = linear(width, hidden_width)
        self.output = linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).relu_())


def normal(*shape: int, deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution."""
    return nn.Parameter(torch.empty(shape).normal_(std=deviation))


def constant(*shape: int, value: float) -> nn.Parameter:
    """A parameter whose entries all start at one value."""
    return nn.Parameter(torch.full(shape, float(value)))

"""Normalisation: of embeddings by their root mean square, of keys and queries by their length.

Both are y = x * factor / sqrt(c * sum(x^2) + epsilon), with a backward pass of its own that makes few passes over x:
there is little to compute and much to read, and autograd's way took several times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from block_recurrent.nn.linear import ones
from block_recurrent.nn.native import usable_for
from block_recurrent.nn.native.norm import FEWEST_ROWS, MULTIPLE, native_norm, native_values_and_units
from block_recurrent.nn.rows import Function

EPSILON = 1e-6
_HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision goes up to float32; float32 and float64 stay."""
    return x.float() if x.dtype in _HALF else x


class RMSNorm(nn.Module):
    """Scale only: no mean, no bias. Computed in float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = ones(width)

    def forward(self, x: Tensor) -> Tensor:
        D = x.shape[-1]
        if _native_for(x, x.numel() // D):
            return native_norm(x.reshape(1, 1, -1, D), self.weight.view(1, D), 1 / D, EPSILON).view(x.shape)
        return _in_full(_RMSNorm.apply if torch.is_grad_enabled() else _rms_norm, x, self.weight)

    def bare(self) -> Function:
        norm, weight = _RMSNorm.apply if torch.is_grad_enabled() else _rms_norm, self.weight
        return lambda x: _in_full(norm, x, weight)


def unit_length(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x (B, H, N, K) over its length along the last axis, times a scale (H, 1, 1) per head: keys and queries."""
    if x.ndim == 4 and _native_for(x, x.shape[2]):
        H, K = x.shape[1], x.shape[3]
        weight = x.new_ones(H, K) if scale is None else scale.view(H, 1).expand(H, K)
        return native_norm(x, weight, 1.0, EPSILON)
    return _in_full(_UnitLength.apply if torch.is_grad_enabled() else _unit_length, x, scale)


def values_and_units(heads: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Several times H heads (B, ..., N, K), scales (..., 1, 1) for all but the first H -> those first H as they are,
    then each H of the others at unit length times their scales: values, then keys and queries."""
    H = heads.shape[1] - len(scales)
    if _native_for(heads, heads.shape[2]):
        return native_values_and_units(heads, scales, EPSILON)
    values, others = heads.split_with_sizes([H, len(scales)], dim=1)
    return values, *unit_length(others, scales).split(H, dim=1)


def _native_for(x: Tensor, rows: int) -> bool:
    return rows >= FEWEST_ROWS and x.shape[-1] % MULTIPLE == 0 and usable_for(x)


def _in_full(norm: Callable[[Tensor, Any], Tensor], x: Tensor, factor: Tensor | None) -> Tensor:
    """In float32 where x is in half precision."""
    if x.dtype in _HALF:
        return norm(x.float(), None if factor is None else factor.float()).to(x.dtype)
    return norm(x, factor)


# Without gradients the plain functions: for a single token, going through autograd costs more than the norm itself.


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (x * _inverse_length(x, 1 / x.shape[-1])).mul_(weight)


def _unit_length(x: Tensor, factor: Tensor | None) -> Tensor:
    inverse = _inverse_length(x, 1.0)
    return x * (inverse if factor is None else inverse.mul_(factor))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse = _inverse_length(x, 1 / x.shape[-1])
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        product = (grads[0] * x).flatten(0, -2)
        # Sums along rows and columns as products with a vector: one pass each, and nothing new of the size of x.
        d_weight = inverse.flatten() @ product
        along = (product @ weight).view_as(inverse)
        d_x = (grads[0] * weight).mul_(inverse)
        return d_x.addcmul_(x, along.mul_(inverse**3), value=-1 / x.shape[-1]), d_weight


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | None) -> Tensor:
        inverse = _inverse_length(x, 1.0)
        ctx.save_for_backward(x, factor, inverse)
        return x * (inverse if factor is None else inverse * factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, factor, inverse = ctx.saved_tensors
        along = (grads[0] * x).sum(-1, keepdim=True)
        d_factor = None
        if factor is not None:
            d_factor = (along * inverse).sum_to_size(factor.shape)
        scaled = inverse if factor is None else inverse * factor
        return (grads[0] * scaled).addcmul_(x, along.mul_(scaled * inverse**2), value=-1), d_factor


def _inverse_length(x: Tensor, share: float) -> Tensor:
    """1 / sqrt(share * sum(x^2) + epsilon) along the last axis, which is kept."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_epsilon(x.dtype, x.device), length, length, value=share).rsqrt_()


@functools.cache
def _epsilon(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for training too, whoever asks first
        return torch.tensor(EPSILON, dtype=dtype, device=device)

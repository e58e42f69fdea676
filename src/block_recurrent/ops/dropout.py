"""Dropout with 16 random bits per value; torch uses 64, which costs a fifth of a training step on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

_LEVELS = 2**16


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Zero values at a rate, and scale the rest to preserve the mean."""
    if not training or rate == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # which can't trace `random_`
        return torch.native_dropout(x, rate, True)[0]  # one kernel, and a byte per value for the mask
    return x * scaled_mask(keep_mask(x, rate), rate, x.dtype)


def keep_mask(like: Tensor, rate: float) -> Tensor:
    """True where a value is kept, in the shape of `like`. The rate is rounded to a multiple of 1/65536."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    # From the least number on: by default the sign bit is never drawn.
    bits = words.random_(torch.iinfo(torch.int64).min, None).view(torch.int16)
    return (bits[: like.numel()] >= _dropped_levels(rate) - _LEVELS // 2).view(like.shape)


def scaled_mask(keep: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """The factors: 0, or the inverse of the share that is kept."""
    return keep.to(dtype).mul_(_LEVELS / (_LEVELS - _dropped_levels(rate)))


def _dropped_levels(rate: float) -> int:
    return min(max(round(rate * _LEVELS), 1), _LEVELS - 1)

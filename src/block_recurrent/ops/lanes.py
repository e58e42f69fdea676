"""Values on a device, slices that begin at a different position in every lane, and tensors with several uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def on_device(values: Sequence[int] | Sequence[bool] | Tensor, device: torch.device) -> Tensor:
    """A tensor of these values on the device, without synchronizing with a GPU."""
    x = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type == "cuda" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


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


def fan_out(x: Tensor, uses: int) -> tuple[Tensor, ...]:
    """x once per use. The gradients of all uses are then summed by one kernel, instead of one per use."""
    return x.expand(uses, *x.shape).unbind(0)

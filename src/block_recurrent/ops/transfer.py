"""Transfer of small values from Python to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[bool] | Tensor, device: torch.device) -> Tensor:
    """A tensor of these values on the device, without synchronizing with a GPU."""
    x = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type == "cuda" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)

"""Small numbers that Python knows, as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[bool] | Tensor, device: torch.device) -> Tensor:
    """A tensor of these values on the device. Python does not wait until a GPU has taken them."""
    x = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type == "cuda" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)

"""Tensors that may be sharded over processes by FSDP."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(x: Tensor) -> Tensor:
    """The part of this process."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """The tensor gathered from all processes, or summed over them if it is a partial sum."""
    return x.full_tensor() if isinstance(x, DTensor) else x

"""Triton kernels for GPUs. triton is imported only when a kernel runs."""

from __future__ import annotations

import importlib.metadata
import os
import re
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from block_recurrent.errors import ConfigError

OLDEST = (3, 3)
"""The first version whose kernels accept tuples."""


def installed() -> bool:
    """Whether a triton version that can compile these kernels is installed."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST


def interpreted() -> bool:
    """Whether kernels run in triton's interpreter, which accepts tensors on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


INSTALLED = installed()
LEVELS = 2**31
"""The rate of dropout is rounded to a multiple of 1/LEVELS."""


def draw_seed(rate: float) -> Tensor:
    """The seed of a kernel's dropout, (1,), on the CPU: drawn without a kernel and without synchronization."""
    if rate == 0:
        return torch.zeros(1, dtype=torch.int64, device="cpu")
    return torch.randint(2**62, (1,), device="cpu")


def levels(rate: float) -> tuple[int, float]:
    """The arguments of kernels for a rate of dropout: how many of LEVELS are dropped, and the scale of the rest."""
    dropped = round(rate * LEVELS)
    return dropped, LEVELS / (LEVELS - dropped)


def launching(x: Tensor) -> AbstractContextManager[object]:
    """The context in which kernels on x's device can be launched."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if not interpreted():
        raise ConfigError("the backend 'triton' is for GPUs; on a CPU it runs with TRITON_INTERPRET=1, for tests")
    return nullcontext()

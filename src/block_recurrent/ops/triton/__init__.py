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


def launching(x: Tensor) -> AbstractContextManager[object]:
    """The context in which kernels on x's device can be launched."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if not interpreted():
        raise ConfigError("the backend 'triton' is for GPUs; on a CPU it runs with TRITON_INTERPRET=1, for tests")
    return nullcontext()

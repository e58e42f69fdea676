"""Kernels in C for CPUs, compiled when the package is installed, where there is a compiler for them.

Everything they do has a plain path in torch, which is taken where they are missing (`brt doctor` tells), for other
precisions, and under torch.compile, which can't look into them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

_BUILDS = {"AVX512": "_avx512", "AVX2": "_avx2"}
"""For each kind of processor, as torch calls it, the library in this folder."""
POINTER = ctypes.c_void_p
_switched_off = False


class TensorArgument(ctypes.Structure):
    """`Tensor` in C: (B, H, rows, K) with the numbers of a row side by side."""

    _fields_ = (("data", POINTER), *((stride, ctypes.c_int64) for stride in ("lane", "head", "row")))

    @classmethod
    def of(cls, x: Tensor) -> TensorArgument:
        return cls(x.data_ptr(), *x.stride()[:3])


def with_rows(x: Tensor) -> Tensor:
    """With the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def usable_for(x: Tensor) -> bool:
    """Whether there are kernels for such a tensor; sharded weights and the like are tensors of another type."""
    fitting = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype == torch.float32
    return fitting and not (_switched_off or torch.compiler.is_compiling()) and library() is not None


@contextmanager
def switched_off() -> Iterator[None]:
    """Inside, torch does everything: to compare the two."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this processor, or None."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = importlib.util.find_spec(f"{__name__}.{_BUILDS[capability]}") if capability in _BUILDS else None
    if found is None or found.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(found.origin)
    except OSError:
        return None
    return loaded if _shares_threads_with_torch() else None


def function(name: str, *arguments: type) -> ctypes._NamedFuncPointer:
    """A function of the library, which returns nothing."""
    loaded = library()
    assert loaded is not None
    found = getattr(loaded, name)
    found.argtypes, found.restype = arguments, None
    return found


def _shares_threads_with_torch() -> bool:
    """Whether this process has one OpenMP library only: with two, each would have threads of its own."""
    maps = Path("/proc/self/maps").read_text()
    return len(set(re.findall(r"\S*/lib[gi]?omp[^/\s]*", maps))) == 1

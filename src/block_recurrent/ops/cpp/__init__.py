"""C kernels for CPUs, compiled when the package is installed, if there is a compiler.

Each is a `torch.library` operator with a fake implementation and a gradient, so that torch.compile and meta tensors see
through it. Wrappers check everything that a kernel relies on before it gets a pointer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from block_recurrent.ops.once import refuse

POINTER = ctypes.c_void_p
_BUILDS = {"AVX512": ("_avx512", "_avx2"), "AVX2": ("_avx2",)}
"""For each kind of processor, as torch calls it, the libraries in this folder that it can run, the fastest first."""


def load(capability: str) -> ctypes.CDLL | None:
    """The fastest available library for a kind of processor."""
    for build in _BUILDS.get(capability, ()):
        found = importlib.util.find_spec(f"{__name__}.{build}")
        if found is None or found.origin is None:
            continue
        try:
            loaded = ctypes.CDLL(found.origin)
        except OSError:
            continue
        return loaded if _shares_threads_with_torch() else None
    return None


def _shares_threads_with_torch() -> bool:
    """Whether this process has only one OpenMP library: with two, each would have its own threads."""
    maps = Path("/proc/self/maps").read_text()
    return len(set(re.findall(r"\S*/lib[gi]?omp[^/\s]*", maps))) == 1


LIBRARY = load(torch.backends.cpu.get_cpu_capability())
"""The library for this processor, or None. Loaded eagerly: torch.compile can't trace a lazy one."""


class TensorArgument(ctypes.Structure):
    """`Tensor` in C: (B, H, rows, K) with the numbers of a row side by side."""

    _fields_ = (("data", POINTER), *((stride, ctypes.c_int64) for stride in ("lane", "head", "row")))


def tensor(x: Tensor, shape: tuple[int, ...]) -> TensorArgument:
    """A tensor (B, H, rows, K) for C, checked."""
    _check(x, shape, torch.float32)
    lane, head, row, number = x.stride()
    if number != 1 and shape[3] != 1:
        check(False, f"rows with strides {x.stride()}")
    return TensorArgument(x.data_ptr(), lane, head, row)


def tensors(xs: Sequence[Tensor], shape: tuple[int, ...]) -> Any:
    """Several of one shape: an array for C."""
    return (TensorArgument * len(xs))(*(tensor(x, shape) for x in xs))


def pointer(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int | None:
    """A contiguous tensor for C, checked; None is a null pointer."""
    if x is None:
        return None
    _check(x, shape, dtype)
    if not x.is_contiguous():
        check(False, f"a tensor with strides {x.stride()}, where it must be contiguous")
    return x.data_ptr()


def _check(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # Messages are formatted only on errors: formatting takes longer than a small kernel.
    if not x.is_cpu or x.dtype != dtype:
        check(False, f"{x.dtype} on {x.device}, where it takes {dtype} on a CPU")
    if x.shape != shape:
        check(False, f"shape {tuple(x.shape)}, where it takes {shape}")


def check(holds: bool, problem: str) -> None:
    """Check before C gets a pointer. An internal error, but not an assertion, which Python can disable."""
    if not holds:
        raise ValueError(f"a C kernel was given {problem}")


def with_rows(x: Tensor) -> Tensor:
    """With the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tokens_first(like: Tensor, K: int | None = None) -> Tensor:
    """Room for (B, H, N, K) with the heads of a token side by side, as products with weights have them."""
    B, H, N = like.shape[:3]
    return like.new_empty(B, N, H, like.shape[3] if K is None else K).transpose(1, 2)


def once_differentiable(*names: str) -> None:
    """Make double backward an error instead of wrong, for operators that compute gradients."""
    for name in names:
        torch.library.register_autograd(name, refuse)


class Kernel:
    """A function of the library. It returns 0, or 1 if it could not allocate memory."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self._bound: tuple[ctypes.CDLL, Any] | None = None

    def __call__(self, *arguments: Any) -> None:
        if LIBRARY is None:
            raise RuntimeError("the C kernels are not compiled for this machine; see `brt doctor`")
        if self._bound is None or self._bound[0] is not LIBRARY:
            function = getattr(LIBRARY, self.name)
            function.argtypes, function.restype = self.arguments, ctypes.c_int
            self._bound = LIBRARY, function
        if self._bound[1](*arguments):
            raise MemoryError(f"not enough memory for the working space of the kernel '{self.name}'")

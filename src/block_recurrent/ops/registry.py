"""Which backend runs an operation: one table for all of them, with the reason for every threshold.

A call uses the first row of the operation's table that matches the device, the dtype and the sizes. To force a
backend, set the environment variable BRT_OPS (`BRT_OPS=reference`) or use the context manager `backend("reference")`;
an operation that has no such backend uses its reference. `brt doctor` prints the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.ops import cpp, triton

REFERENCE = "reference"


@dataclass(frozen=True)
class Row:
    """A backend of an operation, and the calls that it is for."""

    backend: str
    why: str
    """Why it is better here than the rows below."""
    device: str = "any"
    dtypes: tuple[torch.dtype, ...] = ()
    """Empty: all of them."""
    sizes: str = ""
    """The condition on the call's sizes, as text."""
    fits: Callable[..., bool] = lambda **sizes: True
    """The same as a function of the sizes, by name."""

    def takes(self, x: Tensor, sizes: dict[str, int]) -> bool:
        if self.backend == "cpp" and (cpp.LIBRARY is None or type(x) not in (Tensor, nn.Parameter)):
            return False  # tensor subclasses, such as sharded weights
        if self.backend == "triton" and not triton.INSTALLED:
            return False
        if self.device not in ("any", kind_of_device(x)) or (self.dtypes and x.dtype not in self.dtypes):
            return False
        return self.fits(**sizes)


def kind_of_device(x: Tensor) -> str:
    """cpu, cuda and so on. Meta tensors represent those of a GPU, so that its work can be analyzed without one."""
    return "cuda" if x.is_meta else x.device.type


_PLAIN = Row(REFERENCE, "plain torch: every device and dtype")
_FLOAT32 = (torch.float32,)
_FULL = (torch.float32, torch.float64)

TABLE: dict[str, tuple[Row, ...]] = {
    "window_attention": (
        Row(
            "cpp",
            "no weights in memory; for fewer queries, arranging the keys costs more than it saves",
            *("cpu", _FLOAT32, "queries >= 32"),
            lambda queries, **_: queries >= 32,
        ),
        Row(
            "triton",
            "no weights in memory; dropout, and the gradient of the bias without atomic sums, inside the kernels",
            *("cuda", (torch.float32, torch.bfloat16), "triton >= 3.3, heads <= 256"),
            lambda head, **_: head <= 256,
        ),
        Row("tiled", "a tile's weights stay in the cache, and are recomputed in the backward pass", "cpu", _FULL),
        _PLAIN,
    ),
    "attend": (
        Row(
            "cpp",
            "nothing is joined, copied or saved; between those sizes, torch is faster than recomputing the weights",
            *("cpu", _FLOAT32, "queries x keys of a block <= 2^14, or attention weights >= 2^23"),
            lambda pairs, queries, keys, **_: queries * keys <= 2**14 or pairs * queries * keys >= 2**23,
        ),
        Row("sdpa", "torch's fused kernel", "cuda"),
        _PLAIN,  # on a CPU three plain steps are faster than SDPA, whose backward pass recomputes the logits
    ),
    "state_scan": (
        Row(
            "cpp",
            "all blocks in one operator, a lane per thread: half of the time at tiny; torch's products are faster for "
            "wider vectors and longer windows",
            *("cpu", _FLOAT32, "fixed:skip, width <= 384, states and tokens <= 256, multiples of 8 and 16, one dtype"),
            lambda width, keys, mixed, **_: width <= 384 and keys <= 256 and not mixed,
        ),
        _PLAIN,
    ),
    "state_step": (
        Row(
            "cpp",
            "one operator in place of twenty; torch's products are better for attention over many tokens",
            *("cpu", _FLOAT32, "tokens <= 256, widths multiples of 16, one dtype"),
            lambda width, head_width, keys, mixed, **_: (
                keys <= 256 and width % 16 == head_width % 16 == 0 and not mixed
            ),
        ),
        _PLAIN,
    ),
    "norm": (
        Row(
            "cpp",
            "one pass over memory; for fewer rows the call costs more than it saves",
            *("cpu", _FLOAT32, "rows >= 64, width a multiple of 16"),
            lambda rows, width, **_: rows >= 64 and width % 16 == 0,
        ),
        Row(
            "triton",
            "one kernel instead of eight; the result in the dtype of the products that read it",
            *("cuda", (torch.float32, torch.bfloat16), "triton >= 3.3, width <= 16384"),
            lambda rows, width, **_: rows > 0 and width <= 2**14,
        ),
        _PLAIN,
    ),
    "cross_entropy": (
        Row(
            "cpp",
            "exponentials fused with the products; torch's are as fast for wider vectors, and a smaller vocabulary "
            "has too little work for several threads",
            *("cpu", _FLOAT32, "vocabulary >= 4096, width <= 384 and a multiple of 16"),
            lambda vocab, width, **_: vocab >= 4096 and width <= 384 and width % 16 == 0,
        ),
        Row("chunked", "logits of one chunk of tokens at a time; none are saved for the backward pass"),
        _PLAIN,
    ),
    "knn": (
        Row(
            "cpp",
            "no scores in memory; for fewer queries, arranging the keys costs more than it saves",
            *("cpu", _FLOAT32, "queries >= 32"),
            lambda queries, **_: queries >= 32,
        ),
        _PLAIN,
    ),
}
BACKENDS = tuple(dict.fromkeys(row.backend for rows in TABLE.values() for row in rows))
_forced: str | None = None


def select(op: str, x: Tensor, **sizes: int) -> str:
    """The backend for a call of `op` on tensors like x with these sizes."""
    rows = TABLE[op]
    if _forced is not None:
        return _forced if any(row.backend == _forced for row in rows) else REFERENCE
    return next(row.backend for row in rows if row.takes(x, sizes))


def force(name: str | None) -> None:
    """Force a backend for the whole process. Operations without it use their reference; None restores the table."""
    global _forced
    if name is not None and name not in BACKENDS:
        raise ConfigError(
            f"unknown backend '{name}'{did_you_mean(name, BACKENDS)}; the backends are {', '.join(BACKENDS)}"
        )
    if name == "cpp" and cpp.LIBRARY is None:
        raise ConfigError("the backend 'cpp' was not compiled for this machine; see `brt doctor`")
    if name == "triton" and not triton.INSTALLED:
        raise ConfigError("the backend 'triton' needs triton 3.3 or newer: pip install triton")
    _forced = name


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force a backend in this context."""
    before = _forced
    force(name)
    try:
        yield
    finally:
        force(before)


force(os.environ.get("BRT_OPS") or None)

"""Which backend runs an operation: one table for all of them, with the reason beside every threshold.

For a call, the first row of the operation's table that fits the device, the dtype and the sizes is taken. To force a
backend, set the environment variable BRT_OPS (`BRT_OPS=reference`) or use the context manager `backend("reference")`;
an operation that has no such backend takes its reference. `brt doctor` prints the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.ops import cpp

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
    """The condition on the call's sizes, in words."""
    fits: Callable[..., bool] = lambda **sizes: True
    """The same as a function of the sizes, by name."""

    def takes(self, x: Tensor, sizes: dict[str, int]) -> bool:
        if self.backend == "cpp" and (cpp.LIBRARY is None or type(x) not in (Tensor, nn.Parameter)):
            return False  # sharded weights and the like are tensors of another type
        if self.device not in ("any", x.device.type) or (self.dtypes and x.dtype not in self.dtypes):
            return False
        return self.fits(**sizes)


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
        Row("tiled", "a tile's weights stay in the cache, and are computed again in the backward pass", "cpu", _FULL),
        _PLAIN,
    ),
    "attend": (
        Row(
            "cpp",
            "the kernel computes weights twice, which pays where they don't stay in the caches",
            *("cpu", _FLOAT32, "attention weights >= 2^23"),
            lambda weights, **_: weights >= 2**23,
        ),
        Row("sdpa", "torch's fused kernel", "cuda"),
        _PLAIN,  # on a CPU three plain steps are faster than SDPA, whose backward pass computes the logits again
    ),
    "norm": (
        Row(
            "cpp",
            "one pass over memory; for fewer rows the call costs more than it saves",
            *("cpu", _FLOAT32, "rows >= 64, width a multiple of 16"),
            lambda rows, width, **_: rows >= 64 and width % 16 == 0,
        ),
        _PLAIN,
    ),
    "cross_entropy": (
        Row(
            "cpp",
            "exponentials fused with the products; torch's are as fast for wider vectors, and a smaller vocabulary "
            "has too little to share out among threads",
            *("cpu", _FLOAT32, "vocabulary >= 4096, width <= 384 and a multiple of 16"),
            lambda vocab, width, **_: vocab >= 4096 and width <= 384 and width % 16 == 0,
        ),
        Row("chunked", "logits exist for a chunk of tokens at a time; the backward pass needs none"),
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
            f"there is no backend '{name}'{did_you_mean(name, BACKENDS)}; the backends are {', '.join(BACKENDS)}"
        )
    if name == "cpp" and cpp.LIBRARY is None:
        raise ConfigError("the backend 'cpp' was not compiled for this machine; see `brt doctor`")
    _forced = name


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force a backend inside, as `force` does."""
    before = _forced
    force(name)
    try:
        yield
    finally:
        force(before)


force(os.environ.get("BRT_OPS") or None)

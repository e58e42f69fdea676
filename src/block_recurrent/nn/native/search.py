"""Search by the kernel in `search.c`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.nn.native import POINTER, TensorArgument, function, with_rows

FEWEST_QUERIES = 32
"""For fewer, laying out the keys costs more than it saves."""
MULTIPLE = 48
"""Rows that tell which keys count have a multiple of so many numbers; as in C."""


def native_search(queries: Tensor, keys: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """The largest dot products of each query, and whose they are: (B, H, w, n) each, in no order.

    queries (B, H, w, K), keys (B, H, M, K), visible (B, M): which keys count. Where there are fewer than n, the rest is
    minus infinity.
    """
    queries, keys = with_rows(queries), with_rows(keys)
    B, H, w, K = queries.shape
    M = keys.shape[2]
    hidden = queries.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    hidden = F.pad(hidden, (0, -M % MULTIPLE), value=float("-inf"))
    scores = queries.new_empty(B, H, w, neighbors)
    slots = torch.empty(B, H, w, neighbors, dtype=torch.int64)
    shape = _Search(B, H, w, K, M, neighbors, torch.get_num_threads())
    inputs = map(TensorArgument.of, (queries, keys))
    _kernel()(shape, *inputs, hidden.data_ptr(), scores.data_ptr(), slots.data_ptr())
    return scores, slots


class _Search(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("B", "H", "N", "K", "keys", "wanted", "threads"))


@functools.cache
def _kernel() -> Any:
    return function("search", _Search, *2 * [TensorArgument], *3 * [POINTER])

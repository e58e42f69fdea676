"""Search, and attention over what was found, by the kernels in `search.c`."""

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
    B, H, w, _ = queries.shape
    M = keys.shape[2]
    hidden = queries.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    hidden = F.pad(hidden, (0, -M % MULTIPLE), value=float("-inf"))
    scores = queries.new_empty(B, H, w, neighbors)
    slots = torch.empty(B, H, w, neighbors, dtype=torch.int64)
    inputs = map(TensorArgument.of, (queries, keys))
    _search()(_Search.of(queries, M, neighbors), *inputs, hidden.data_ptr(), scores.data_ptr(), slots.data_ptr())
    return scores, slots


def native_attend_found(
    queries: Tensor, keys: Tensor, values: Tensor, scores: Tensor, slots: Tensor, holder: object
) -> Tensor:
    """Each query over the entries that `native_search` found for it: (B, H, w, K).

    Keys and values (B, H, M, K) get no gradients and are not copied. `holder`: kept until the backward pass is done,
    which reads them again; while it lives, nobody may write over them.
    """
    return _AttendFound.apply(queries, keys, values, scores, slots, holder)


class _AttendFound(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, scores: Tensor, slots: Tensor, holder: object
    ) -> Tensor:
        B, H, w, K = queries.shape
        shape = _Search.of(queries, keys.shape[2], slots.shape[3])
        out = queries.new_empty(B, w, H, K).transpose(1, 2)
        found = scores.data_ptr(), slots.data_ptr()
        _attend_found()(shape, TensorArgument.of(values), *found, TensorArgument.of(out))
        ctx.save_for_backward(scores, slots)
        # Not saved as tensors: torch would forbid to write anywhere in them, also where nothing was found.
        ctx.keys, ctx.values, ctx.shape, ctx.holder = keys, values, shape, holder
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scores, slots = ctx.saved_tensors
        d_out = with_rows(grads[0])
        B, H, w, K = d_out.shape
        dq = d_out.new_empty(B, w, H, K).transpose(1, 2)
        entries, gradients = (map(TensorArgument.of, tensors) for tensors in ((ctx.keys, ctx.values), (d_out, dq)))
        _attend_found_backward()(ctx.shape, *entries, scores.data_ptr(), slots.data_ptr(), *gradients)
        return dq, None, None, None, None, None


class _Search(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("B", "H", "N", "K", "keys", "wanted", "threads"))

    @classmethod
    def of(cls, queries: Tensor, keys: int, wanted: int) -> _Search:
        return cls(*queries.shape, keys, wanted, torch.get_num_threads())


@functools.cache
def _search() -> Any:
    return function("search", _Search, *2 * [TensorArgument], *3 * [POINTER])


@functools.cache
def _attend_found() -> Any:
    return function("attend_found", _Search, TensorArgument, *2 * [POINTER], TensorArgument)


@functools.cache
def _attend_found_backward() -> Any:
    return function("attend_found_backward", _Search, *2 * [TensorArgument], *2 * [POINTER], *2 * [TensorArgument])

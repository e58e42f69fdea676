"""Search in a kNN memory, and attention over what was found, by the kernels in `knn.c`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops.cpp import (
    POINTER,
    Kernel,
    TensorArgument,
    check,
    once_differentiable,
    pointer,
    tensor,
    tokens_first,
    with_rows,
)

MULTIPLE = 48
"""The rows of visible keys are padded to a multiple of this; as in C."""


def cpp_knn_attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, neighbors: int) -> Tensor:
    """As `knn.knn_attend`."""
    q = with_rows(q)
    scores, slots = torch.ops.brt.knn_search(q.detach(), keys, visible, neighbors)
    return torch.ops.brt.knn_attend(q, keys, values, scores, slots)


class _Search(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("B", "H", "N", "K", "keys", "wanted", "threads"))

    @classmethod
    def of(cls, q: Tensor, keys: int, wanted: int) -> _Search:
        return cls(*q.shape, keys, wanted, torch.get_num_threads())


_search = Kernel("search", _Search, *2 * [TensorArgument], *3 * [POINTER])
_attend = Kernel("attend_found", _Search, TensorArgument, *2 * [POINTER], TensorArgument)
_attend_backward = Kernel(
    "attend_found_backward", _Search, *2 * [TensorArgument], *2 * [POINTER], *2 * [TensorArgument]
)
torch.library.define(
    "brt::knn_search", "(Tensor q, Tensor keys, Tensor visible, int neighbors) -> (Tensor scores, Tensor slots)"
)
torch.library.define("brt::knn_attend", "(Tensor q, Tensor keys, Tensor values, Tensor scores, Tensor slots) -> Tensor")
torch.library.define(
    "brt::knn_attend_backward",
    "(Tensor q, Tensor keys, Tensor values, Tensor scores, Tensor slots, Tensor d_out) -> Tensor",
)


@torch.library.register_fake("brt::knn_search")
def _search_room(q: Tensor, keys: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    B, H, w, _ = q.shape
    return q.new_empty(B, H, w, neighbors), q.new_empty(B, H, w, neighbors, dtype=torch.int64)


@torch.library.impl("brt::knn_search", "CPU")
def _knn_search(q: Tensor, keys: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """The largest dot products of each query, and whose they are: (B, H, w, n) each, in no order.

    q (B, H, w, K), keys (B, H, M, K), visible (B, M): which keys count. Where there are fewer than n, the rest is
    minus infinity.
    """
    B, H, w, K = q.shape
    M = keys.shape[2]
    check(tuple(visible.shape) == (B, M) and 0 < neighbors <= M, f"{neighbors} neighbors of {tuple(visible.shape)}")
    hidden = q.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    hidden = F.pad(hidden, (0, -M % MULTIPLE), value=float("-inf"))
    scores, slots = _search_room(q, keys, visible, neighbors)
    found = (B, H, w, neighbors)
    _search(
        _Search.of(q, M, neighbors),
        *(tensor(q, (B, H, w, K)), tensor(keys, (B, H, M, K)), pointer(hidden, tuple(hidden.shape))),
        *(pointer(scores, found), pointer(slots, found, torch.int64)),
    )
    return scores, slots


@torch.library.impl("brt::knn_attend", "CPU")
def _knn_attend(q: Tensor, keys: Tensor, values: Tensor, scores: Tensor, slots: Tensor) -> Tensor:
    """Each query over the entries that were found for it: (B, H, w, K)."""
    B, H, w, K = q.shape
    M, n = keys.shape[2], slots.shape[3]
    out, found = tokens_first(q), (B, H, w, n)
    _attend(
        _Search.of(q, M, n), tensor(values, (B, H, M, K)), *_chosen(scores, slots, found, M), tensor(out, (B, H, w, K))
    )
    return out


def _chosen(scores: Tensor, slots: Tensor, found: tuple[int, ...], entries: int) -> tuple[int | None, int | None]:
    """What was found, for C, which computes addresses from the slots."""
    pointers = pointer(scores, found), pointer(slots, found, torch.int64)
    low, high = (int(bound) for bound in slots.aminmax()) if slots.numel() else (0, 0)
    check(low >= 0 and high < entries, f"slots from {low} to {high} of {entries} entries")
    return pointers


torch.library.register_fake("brt::knn_attend")(lambda q, *_: tokens_first(q))
torch.library.register_fake("brt::knn_attend_backward")(lambda q, *_: tokens_first(q))


@torch.library.impl("brt::knn_attend_backward", "CPU")
def _knn_attend_backward(
    q: Tensor, keys: Tensor, values: Tensor, scores: Tensor, slots: Tensor, d_out: Tensor
) -> Tensor:
    """The gradient of the queries. Entries of a memory have none."""
    B, H, w, K = q.shape
    M, n = keys.shape[2], slots.shape[3]
    dq, found = tokens_first(q), (B, H, w, n)
    entries = tensor(keys, (B, H, M, K)), tensor(values, (B, H, M, K))
    chosen = _chosen(scores, slots, found, M)
    _attend_backward(_Search.of(q, M, n), *entries, *chosen, tensor(d_out, (B, H, w, K)), tensor(dq, (B, H, w, K)))
    return dq


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.brt.knn_attend_backward(*ctx.saved_tensors, with_rows(d_out)), None, None, None, None


torch.library.register_autograd("brt::knn_attend", _gradients, setup_context=_save)
once_differentiable("brt::knn_attend_backward")

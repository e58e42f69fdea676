"""Cross-entropy by the kernel in `cross_entropy.c`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from block_recurrent.nn.native import POINTER, function, usable_for

FEWEST_PIECES, WIDEST = 4096, 384
"""With a smaller vocabulary there is too little to share out among threads; with wider vectors, torch's products are as
fast as those of the kernel, and exponentials matter less."""
MULTIPLE = 16
"""Vectors have a multiple of so many numbers."""


class Gradients(NamedTuple):
    """Losses (tokens,), and the gradients of the sum of those that count, where they were asked for."""

    losses: Tensor
    d_hidden: Tensor | None
    d_table: Tensor | None


def fits(hidden: Tensor, table: Tensor) -> bool:
    """Whether the kernel can do these, and is faster than torch."""
    V, D = table.shape
    good = V >= FEWEST_PIECES and D <= WIDEST and D % MULTIPLE == 0 and len(hidden) > 0
    return good and usable_for(hidden) and usable_for(table)


def native_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, need_hidden: bool, need_table: bool
) -> Gradients:
    """hidden (tokens, D), table (V, D), targets (tokens,), counts (tokens,) bool."""
    hidden, table, targets, counts = (x.contiguous() for x in (hidden, table, targets, counts.to(hidden.dtype)))
    losses = hidden.new_empty(len(hidden))
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_table = torch.empty_like(table) if need_table else None
    problem = _Problem(*hidden.shape, len(table), torch.get_num_threads())
    tensors = (hidden, table, targets, counts, losses, d_hidden, d_table)
    _kernel()(problem, *(None if x is None else x.data_ptr() for x in tensors))
    return Gradients(losses, d_hidden, d_table)


class _Problem(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("N", "D", "V", "threads"))


@functools.cache
def _kernel() -> Any:
    return function("cross_entropy", _Problem, *7 * [POINTER])

"""Cross-entropy by the kernel in `loss.c`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from block_recurrent.ops.cpp import POINTER, Kernel, check, once_differentiable, pointer


def cpp_cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """As `loss.cross_entropy`: hidden (tokens, D), D a multiple of 16; table (V, D). The sum, and each."""
    gradients = torch.is_grad_enabled()
    needed = hidden.requires_grad and gradients, table.requires_grad and gradients
    inputs = (x.contiguous() for x in (hidden, table, targets, counts.to(hidden.dtype)))
    return torch.ops.brt.cross_entropy(*inputs, *needed)[:2]


class _Problem(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("N", "D", "V", "threads"))


_kernel = Kernel("cross_entropy", _Problem, *7 * [POINTER])
_Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
torch.library.define(
    "brt::cross_entropy",
    "(Tensor hidden, Tensor table, Tensor targets, Tensor counts, bool need_hidden, bool need_table)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("brt::cross_entropy")
def _room(
    hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, need_hidden: bool, need_table: bool
) -> _Outputs:
    """The sum, each loss, and the gradients of the sum, empty where they are not needed."""
    d_hidden = hidden.new_empty(hidden.shape if need_hidden else 0)
    return (
        hidden.new_empty(()),
        hidden.new_empty(len(hidden)),
        d_hidden,
        table.new_empty(table.shape if need_table else 0),
    )


@torch.library.impl("brt::cross_entropy", "CPU")
def _cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, need_hidden: bool, need_table: bool
) -> _Outputs:
    total, losses, d_hidden, d_table = _room(hidden, table, targets, counts, need_hidden, need_table)
    (N, D), V = hidden.shape, len(table)
    check(N > 0 and D % 16 == 0, f"{N} vectors of {D} numbers")
    low, high = (int(bound) for bound in targets.aminmax())
    check(low >= 0 and high < V, f"targets from {low} to {high} for {V} rows")
    _kernel(
        _Problem(N, D, V, torch.get_num_threads()),
        *(pointer(hidden, (N, D)), pointer(table, (V, D)), pointer(targets, (N,), torch.int64), pointer(counts, (N,))),
        *(pointer(losses, (N,)), pointer(d_hidden if need_hidden else None, (N, D))),
        pointer(d_table if need_table else None, (V, D)),
    )
    return total.copy_((losses * counts).sum()), losses, d_hidden, d_table


torch.library.define(
    "brt::cross_entropy_backward",
    "(Tensor hidden, Tensor table, Tensor d_hidden, Tensor d_table, Tensor d_total) -> (Tensor, Tensor)",
)


@torch.library.register_fake("brt::cross_entropy_backward")
@torch.library.impl("brt::cross_entropy_backward", "CPU")
def _scaled(hidden: Tensor, table: Tensor, d_hidden: Tensor, d_table: Tensor, d_total: Tensor) -> tuple[Tensor, Tensor]:
    """An operator for `once_differentiable`: these gradients depend on the vectors and the table."""
    return d_hidden * d_total, d_table * d_total


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Outputs) -> None:
    ctx.save_for_backward(*inputs[:2], *output[2:])
    ctx.needed = inputs[4:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scaled = torch.ops.brt.cross_entropy_backward(*ctx.saved_tensors, d_total)
    return *(d if needed else None for d, needed in zip(scaled, ctx.needed, strict=True)), None, None, None, None


torch.library.register_autograd("brt::cross_entropy", _gradients, setup_context=_save)
once_differentiable("brt::cross_entropy_backward")

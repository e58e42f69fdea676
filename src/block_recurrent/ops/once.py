"""Backward passes that can't be differentiated: gradients of gradients are an error instead of wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def refuse(ctx: Any, *grads: Any) -> None:
    """The backward pass of a backward pass."""
    raise RuntimeError(
        "the kernels are once_differentiable: for gradients of gradients use the reference, with "
        "`block_recurrent.ops.backend('reference')` or BRT_OPS=reference"
    )


def once_differentiable(backward: Backward) -> Backward:
    """For an autograd function. Its gradients depend on the incoming ones and on what was saved: torch's decorator of
    this name only knows the former, so that a gradient of gradients through the weights would be wrong.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # it is only for `create_graph`
            return results
        given = [d for d in results if d is not None]
        linked = iter(_Linked.apply(len(given), *given, *grads, *ctx.saved_tensors))
        return tuple(None if d is None else next(linked) for d in results)

    return once


class _Linked(torch.autograd.Function):
    """The first `count` tensors as they are, as results of all of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    backward = staticmethod(refuse)

"""Normalization by the kernels in `norm_kernels.py`, as `torch.library` operators with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from block_recurrent.ops.cpp import once_differentiable, tokens_first, with_rows
from block_recurrent.ops.triton import draw_seed, launching, levels

PROGRAMS = 512
"""Programs of the backward pass of `rms`: four per multiprocessor of a large GPU. Each sums over its rows."""
ROWS = 16
"""Rows per program of `heads`."""


def triton_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `norm.residual_norm`, with the norm in `dtype`."""
    added = None if added is None else added.contiguous()
    return torch.ops.brt.triton_rms(x.contiguous(), added, weight, draw_seed(dropout), epsilon, dtype, dropout)


def triton_add_dropout(x: Tensor, added: Tensor, dropout: float) -> Tensor:
    """As `norm.add_dropout`."""
    return torch.ops.brt.triton_add_dropout(x.contiguous(), added.contiguous(), draw_seed(dropout), dropout)


def triton_heads(
    heads: Tensor, scales: Tensor, values: Tensor | None, keys: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    """Values, keys, queries and other queries, as `norm.unit_heads`; the first two after cached ones, if there are
    any: then also the next caches, of values and of keys."""
    cached = (None if x is None else with_rows(x) for x in (values, keys))
    return torch.ops.brt.triton_heads(with_rows(heads), scales.flatten(), *cached, epsilon)[:6]


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def constants_of_rows(D: int) -> dict[str, Any]:
    """What kernels of rows are compiled for."""
    return {"D": D, "BLOCK_D": _block(D), "num_warps": min(max(_block(D) // 256, 1), 16)}


def constants_of_heads(K: int) -> dict[str, Any]:
    """What kernels of heads are compiled for."""
    return {"ROWS": ROWS, "K": K, "BLOCK_K": _block(K), "num_warps": 4}


def _launch_rows(kernel: str, programs: int, arguments: tuple[Any, ...], like: Tensor, **flags: bool) -> None:
    with launching(like):
        from block_recurrent.ops.triton import norm_kernels

        getattr(norm_kernels, kernel)[(programs,)](*arguments, **constants_of_rows(like.shape[-1]), **flags)


torch.library.define(
    "brt::triton_rms",
    "(Tensor x, Tensor? added, Tensor weight, Tensor seed, float epsilon, ScalarType dtype, float dropout)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "brt::triton_rms_backward",
    "(Tensor x, Tensor weight, Tensor seed, float epsilon, float dropout, Tensor dy, Tensor? d_sum, ScalarType? added)"
    " -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("brt::triton_rms")
def _rms_room(x: Tensor, added: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=rest[3])


@torch.library.impl("brt::triton_rms", ("CUDA", "CPU"))
def _rms(
    x: Tensor, added: Tensor | None, weight: Tensor, seed: Tensor, epsilon: float, dtype: torch.dtype, dropout: float
) -> tuple[Tensor, Tensor]:
    total, y = _rms_room(x, added, weight, seed, epsilon, dtype)
    arguments = (x, x if added is None else added, weight, total, y, seed.item(), epsilon, *levels(dropout))
    rows = x.numel() // x.shape[-1]
    _launch_rows("rms", rows, arguments, x, ADDED=added is not None, DROPOUT=dropout > 0)
    return total, y


@torch.library.register_fake("brt::triton_rms_backward")
def _rms_backward_room(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    added = rest[-1]
    return (
        torch.empty_like(x),
        x.new_empty(0) if added is None else torch.empty_like(x, dtype=added),
        torch.empty_like(weight),
    )


@torch.library.impl("brt::triton_rms_backward", ("CUDA", "CPU"))
def _rms_backward(
    x: Tensor,
    weight: Tensor,
    seed: Tensor,
    epsilon: float,
    dropout: float,
    dy: Tensor,
    d_sum: Tensor | None,
    added: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    D = x.shape[-1]
    rows = x.numel() // D
    at_once = -(-rows // PROGRAMS)
    programs = -(-rows // at_once)
    dx, d_added, _ = _rms_backward_room(x, weight, added)
    d_weight = x.new_empty(programs, D, dtype=torch.float32)
    gradients = (dy, dy if d_sum is None else d_sum, dx, d_added, d_weight)
    arguments = (x, weight, *gradients, seed.item(), epsilon, *levels(dropout), rows, at_once)
    flags = {"SUM": d_sum is not None, "ADDED": added is not None, "DROPOUT": dropout > 0}
    _launch_rows("rms_backward", programs, arguments, x, **flags)
    return dx, d_added, d_weight.sum(0).to(weight.dtype)


def _save_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, added, weight, seed, epsilon, _, dropout = inputs
    ctx.save_for_backward(output[0], weight, seed)
    ctx.constants, ctx.added = (epsilon, dropout), None if added is None else added.dtype
    ctx.set_materialize_grads(False)


def _rms_gradients(ctx: Any, d_sum: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, seed = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    d_sum = None if d_sum is None else d_sum.contiguous()
    dx, d_added, d_weight = torch.ops.brt.triton_rms_backward(x, weight, seed, *ctx.constants, dy, d_sum, ctx.added)
    return dx, None if ctx.added is None else d_added, d_weight, None, None, None, None


torch.library.register_autograd("brt::triton_rms", _rms_gradients, setup_context=_save_rms)

torch.library.define("brt::triton_add_dropout", "(Tensor x, Tensor added, Tensor seed, float dropout) -> Tensor")
torch.library.define(
    "brt::triton_dropout_backward", "(Tensor d_out, Tensor seed, float dropout, ScalarType dtype) -> Tensor"
)
torch.library.register_fake("brt::triton_add_dropout")(lambda x, *_: torch.empty_like(x))
torch.library.register_fake("brt::triton_dropout_backward")(
    lambda d_out, seed, dropout, dtype: torch.empty_like(d_out, dtype=dtype)
)


@torch.library.impl("brt::triton_add_dropout", ("CUDA", "CPU"))
def _add_dropout(x: Tensor, added: Tensor, seed: Tensor, dropout: float) -> Tensor:
    out = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    _launch_rows("add_dropout", rows, (x, added, out, seed.item(), *levels(dropout)), x, ADD=True)
    return out


@torch.library.impl("brt::triton_dropout_backward", ("CUDA", "CPU"))
def _dropout_backward(d_out: Tensor, seed: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    d_added = torch.empty_like(d_out, dtype=dtype)
    rows = d_out.numel() // d_out.shape[-1]
    _launch_rows("add_dropout", rows, (d_out, d_out, d_added, seed.item(), *levels(dropout)), d_out, ADD=False)
    return d_added


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, added, seed, ctx.dropout = inputs
    ctx.save_for_backward(seed)
    ctx.dtype = added.dtype


def _dropout_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    d_added = torch.ops.brt.triton_dropout_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.dropout, ctx.dtype)
    return d_out, d_added, None, None


torch.library.register_autograd("brt::triton_add_dropout", _dropout_gradients, setup_context=_save_dropout)

torch.library.define(
    "brt::triton_heads",
    "(Tensor heads, Tensor scales, Tensor? old_values, Tensor? old_keys, float epsilon)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "brt::triton_heads_backward",
    "(Tensor keys, Tensor queries, Tensor others, Tensor scales, Tensor inverses, int cached, ScalarType? old,"
    " Tensor d_values, Tensor d_keys, Tensor d_queries, Tensor? d_others, Tensor? d_next_values, Tensor? d_next_keys)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("brt::triton_heads")
def _heads_room(
    heads: Tensor, scales: Tensor, old_values: Tensor | None, old_keys: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    B, _, N, K = heads.shape
    H, C = heads.shape[1] - len(scales), _cached(old_values)
    values, keys = (heads.new_empty(B, H, C + N, K) if C else tokens_first(heads[:, :H]) for _ in range(2))
    others = heads.new_empty(0) if heads.shape[1] == 3 * H else tokens_first(heads[:, :H])
    next_values, next_keys = (heads.new_empty(B, H, C, K) for _ in range(2))
    inverses = heads.new_empty(B, len(scales), N, dtype=torch.float32)
    return values, keys, tokens_first(heads[:, :H]), others, next_values, next_keys, inverses


def _cached(old: Tensor | None) -> int:
    return 0 if old is None else old.shape[2]


def _strided(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:3] if x.ndim == 4 else (0, 0, 0) for x in tensors)


def _launch_heads(kernel: str, arguments: tuple[Any, ...], heads: Tensor, C: int, H: int, **flags: bool) -> None:
    """heads (B, heads, N, K): with a program for each head and some rows, the C cached ones included."""
    B, count, N, K = heads.shape
    grid = (-(-B * (C + N) // ROWS), count)
    with launching(heads):
        from block_recurrent.ops.triton import norm_kernels

        getattr(norm_kernels, kernel)[grid](*arguments, B * (C + N), C, N, H, **constants_of_heads(K), **flags)


@torch.library.impl("brt::triton_heads", ("CUDA", "CPU"))
def _heads(
    heads: Tensor, scales: Tensor, old_values: Tensor | None, old_keys: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    *made, inverses = _heads_room(heads, scales, old_values, old_keys, epsilon)
    cached = (heads if old_values is None else old_values, heads if old_keys is None else old_keys)
    strides = _strided(heads, *cached, *made)
    arguments = (heads, scales, *cached, *made, inverses, *strides, epsilon)
    _launch_heads("heads", arguments, heads, _cached(old_values), heads.shape[1] - len(scales))
    return *made, inverses


@torch.library.register_fake("brt::triton_heads_backward")
def _heads_backward_room(
    keys: Tensor,
    queries: Tensor,
    others: Tensor,
    scales: Tensor,
    inverses: Tensor,
    cached: int,
    old: torch.dtype | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    B, H, _, K = queries.shape
    d_old = (keys.new_empty(B, H, cached if old else 0, K, dtype=old) for _ in range(2))
    dx = tokens_first(queries[:, :1].expand(-1, H + len(scales), -1, -1))
    return dx, torch.empty_like(scales), *d_old


@torch.library.impl("brt::triton_heads_backward", ("CUDA", "CPU"))
def _heads_backward(
    keys: Tensor,
    queries: Tensor,
    others: Tensor,
    scales: Tensor,
    inverses: Tensor,
    cached: int,
    old: torch.dtype | None,
    *gradients: Tensor | None,
) -> tuple[Tensor, ...]:
    results = keys, queries, others
    dx, _, *d_old = _heads_backward_room(*results, scales, inverses, cached, old)
    B, H, N, _ = queries.shape
    d_scales = scales.new_empty(-(-B * (cached + N) // ROWS), len(scales), dtype=torch.float32)
    given = tuple(queries if x is None else x for x in gradients)
    strides = _strided(*results, *given, dx, *d_old)
    arguments = (*results, scales, inverses, *given, dx, d_scales, *d_old, *strides)
    flags = {"NEXT": gradients[-1] is not None, "OLD": old is not None}
    _launch_heads("heads_backward", arguments, dx, cached, H, **flags)
    return dx, d_scales.sum(0).to(scales.dtype), *d_old


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, scales, old_values, *_ = inputs
    _, keys, queries, others, *_, inverses = output
    # Not the heads: the results are kept for attention anyway.
    ctx.save_for_backward(keys, queries, others, scales, inverses)
    ctx.mark_non_differentiable(inverses)
    ctx.cached, ctx.old = _cached(old_values), None if old_values is None else old_values.dtype
    ctx.shapes = [x.shape for x in output[:-1]]
    ctx.set_materialize_grads(False)


def _heads_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    keys, *saved = ctx.saved_tensors
    given = [None if x is None else with_rows(x) for x in gradients[:-1]]
    # Missing gradients become zeros, except those of the next caches, which most training steps don't have.
    unused = {3} if given[3] is None and not ctx.shapes[3].numel() else set()
    unused |= {4, 5} if given[4] is given[5] is None else set()
    given = [
        keys.new_zeros(shape) if x is None and place not in unused else x
        for place, (x, shape) in enumerate(zip(given, ctx.shapes, strict=True))
    ]
    old = ctx.old if ctx.needs_input_grad[2] or ctx.needs_input_grad[3] else None
    dx, d_scales, d_values, d_keys = torch.ops.brt.triton_heads_backward(keys, *saved, ctx.cached, old, *given)
    return dx, d_scales, d_values if old else None, d_keys if old else None, None


torch.library.register_autograd("brt::triton_heads", _heads_gradients, setup_context=_save_heads)
once_differentiable("brt::triton_rms_backward", "brt::triton_dropout_backward", "brt::triton_heads_backward")

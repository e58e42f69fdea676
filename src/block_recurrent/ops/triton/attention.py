"""Window attention by the kernels in `attention_kernels.py`, as a `torch.library` operator with a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from block_recurrent.ops.cpp import once_differentiable, tokens_first, with_rows
from block_recurrent.ops.triton import draw_seed, interpreted, launching, levels


class Tiles(NamedTuple):
    """Queries and keys of a tile, and options of the compiler."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def triton_window_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, fixed_keys: int = 0
) -> Tensor:
    """q (B, H, N, K), k and v (B, H, W + N, K), bias (H, W) -> (B, H, N, K).

    The first `fixed_keys` keys and values get no gradient.
    """
    rows = (with_rows(x) for x in (q, k, v))
    bias = bias.float().contiguous()
    return torch.ops.brt.triton_attention(*rows, bias, draw_seed(dropout), dropout, fixed_keys)[0]


_TILES = {
    ("forward", 2): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 2)},
    ("forward", 4): {64: Tiles(64, 32, 8, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(16, 32, 8, 2)},
    ("queries_backward", 2): {64: Tiles(64, 64, 8, 1), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    ("queries_backward", 4): {64: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 4, 2)},
    ("keys_backward", 2): {64: Tiles(32, 64, 8, 1), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    ("keys_backward", 4): {64: Tiles(32, 32, 8, 2), 256: Tiles(16, 32, 8, 2)},
}
"""By kernel and bytes of a number, up to which head size. The largest that keep everything in registers on sm_80 and
sm_90: results/triton-aot.md."""


def tiles_of(kernel: str, K: int, dtype: torch.dtype) -> Tiles:
    return next(tiles for widest, tiles in _TILES[kernel, dtype.itemsize].items() if widest >= K)


def constants(kernel: str, K: int, dtype: torch.dtype, window: int, dropout: float) -> dict[str, Any]:
    """What a kernel is compiled for."""
    tiles = tiles_of(kernel, K, dtype)
    sizes = {"TILE": tiles.queries} if kernel == "queries_backward" else {"QUERIES": tiles.queries, "KEYS": tiles.keys}
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if interpreted():
        precision = "interpreted"
    return sizes | {
        "W": window,
        "K": K,
        "BLOCK_K": max(16, 1 << (K - 1).bit_length()),
        "DROPOUT": dropout > 0,
        "PRECISION": precision,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _launch(kernel: str, q: Tensor, window: int, dropout: float, arguments: tuple[Any, ...], rows: int) -> None:
    """`arguments` and the numbers of dropout, with a program for each head and tile of rows."""
    chosen = constants(kernel, q.shape[3], q.dtype, window, dropout)
    at_once = chosen.get("TILE") or chosen["KEYS" if kernel == "keys_backward" else "QUERIES"]
    grid = (-(-rows // at_once) * q.shape[0] * q.shape[1],)
    with launching(q):
        from block_recurrent.ops.triton import attention_kernels as kernels

        getattr(kernels, kernel)[grid](*arguments, *levels(dropout), **chosen)


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:3] for x in tensors)


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor seed, float dropout, int fixed_keys"
torch.library.define("brt::triton_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)")
torch.library.define(
    "brt::triton_attention_backward",
    f"({_ARGUMENTS}, Tensor out, Tensor log_sums, Tensor d_out) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("brt::triton_attention")
def _room(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("brt::triton_attention", ("CUDA", "CPU"))
def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: Tensor, dropout: float, fixed_keys: int
) -> tuple[Tensor, Tensor]:
    out, log_sums = _room(q)
    H, N = q.shape[1:3]
    arguments = (q, k, v, bias, seed.item(), out, log_sums, *_strides(q, k, v, out), H, N)
    _launch("forward", q, bias.shape[1], dropout, arguments, N)
    return out, log_sums


@torch.library.register_fake("brt::triton_attention_backward")
def _backward_room(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tokens_first(q), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(bias)


@torch.library.impl("brt::triton_attention_backward", ("CUDA", "CPU"))
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    seed: Tensor,
    dropout: float,
    fixed_keys: int,
    out: Tensor,
    log_sums: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, _ = _backward_room(q, k, v, bias)
    (B, H, N, K), W = q.shape, bias.shape[1]
    tile = tiles_of("queries_backward", K, q.dtype).queries
    d_bias = bias.new_empty(B, H, -(-N // tile), W)  # of each tile of queries: summed in a fixed order
    deltas = torch.empty_like(log_sums)
    inputs = (q, k, v, bias, seed.item())
    arguments = (*inputs, out, log_sums, d_out, dq, d_bias, deltas, *_strides(q, k, v, out, d_out, dq), H, N)
    _launch("queries_backward", q, W, dropout, arguments, N)
    arguments = (*inputs, log_sums, d_out, deltas, dk, dv, *_strides(q, k, v, d_out, dk, dv), H, N, fixed_keys)
    _launch("keys_backward", q, W, dropout, arguments, N + W)
    return dq, dk, dv, d_bias.sum((0, 2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.constants = inputs[5:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, log_sums = ctx.saved_tensors
    gradients = torch.ops.brt.triton_attention_backward(*inputs, *ctx.constants, out, log_sums, with_rows(d_out))
    return *gradients, None, None, None


torch.library.register_autograd("brt::triton_attention", _gradients, setup_context=_save)
once_differentiable("brt::triton_attention_backward")

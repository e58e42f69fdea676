"""The recurrent state through all blocks of a call, by the kernel in `scan.c`; gradients of weights by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def cpp_state_scan(
    state: Tensor, weights: Sequence[Tensor], keys: Tensor, values: Tensor, blocks: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `scan.state_scan`, with the weights of the view and those of the average.

    Returns the states after each block (T, B, S, D), and keys and values before it, (T, B, H, S, K) each.
    """
    parts = [x.contiguous() for x in (state, *weights)]
    states, *views = torch.ops.brt.state_scan(*parts, with_rows(keys), with_rows(values), blocks, epsilon)[:3]
    own_keys, own_values = (x.unflatten(0, (blocks, -1)) for x in views)
    return states, own_keys, own_values


class _Scan(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((letter, ctypes.c_int) for letter in "BSDHKWT"),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


class _Weights(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, POINTER) for name in ("norm", "ids", "projection", "scales", "map", "bias", "keep"))


class _Saved(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, POINTER) for name in ("states", "x", "joined", "attention", "candidate", "log_sums"))


class _Sums(ctypes.Structure):
    """As in C."""

    _fields_ = tuple((name, POINTER) for name in ("norm", "ids", "scales", "keep"))


_inputs = _Scan, POINTER, _Weights, TensorArgument, TensorArgument, _Saved
_forward = Kernel("state_scan", *_inputs, TensorArgument, TensorArgument)
_backward = Kernel(
    "state_scan_backward",
    *(*_inputs, POINTER, TensorArgument, TensorArgument, POINTER, TensorArgument, TensorArgument, _Sums),
    *(POINTER, POINTER),
)


class _Inputs(NamedTuple):
    state: Tensor
    norm: Tensor
    ids: Tensor
    projection: Tensor
    scales: Tensor
    map: Tensor
    bias: Tensor
    keep: Tensor
    keys: Tensor
    values: Tensor
    blocks: int
    epsilon: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, S, D, H, K, W, T."""
        (B, S, D), (_, H, rows, K) = self.state.shape, self.keys.shape
        return B, S, D, H, K, rows // (1 + self.blocks), self.blocks

    def room(self) -> list[Tensor]:
        """For states; keys and values; x, joined, attention, candidates and logarithms of sums."""
        B, S, D, H, K, _, T = self.sizes
        rows, new = (T, B, S), self.state.new_empty
        heads = [new(T * B, S, H, K).transpose(1, 2) for _ in range(2)]
        widths = D, 4 * H * K, 2 * H * K, D
        return [new(*rows, D), *heads, *(new(*rows, width) for width in widths), new(T, B, 2, H, S)]

    def for_c(self, states: Tensor, x: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        """Checked: sizes, state, weights, keys and values of the tokens, and what the forward pass saved."""
        B, S, D, H, K, W, T = self.sizes
        HK = H * K
        multiples = S % 8 == D % 16 == K % 16 == 0 and self.keys.shape[2] == (1 + T) * W
        if not (multiples and min(B, S, D, H, K, W, T) > 0):
            check(False, f"sizes {self.sizes} of a scan")
        weights = {"norm": (D,), "ids": (S, D), "projection": (4 * HK, D), "scales": (3 * H,)}
        weights |= {"map": (D, 2 * HK), "bias": (D,), "keep": (D,)}
        widths = D, D, 4 * HK, 2 * HK, D
        saved = [pointer(t, (T, B, S, width)) for t, width in zip((states, x, *rest[:3]), widths, strict=True)]
        return (
            _Scan(*self.sizes, self.epsilon, torch.get_num_threads()),
            pointer(self.state, (B, S, D)),
            _Weights(*(pointer(getattr(self, name), shape) for name, shape in weights.items())),
            *(tensor(rows, (B, H, (1 + T) * W, K)) for rows in (self.keys, self.values)),
            _Saved(*saved, pointer(rest[3], (T, B, 2, H, S))),
        )


_ARGUMENTS = (
    "Tensor state, Tensor norm, Tensor ids, Tensor projection, Tensor scales, Tensor map, Tensor bias, Tensor keep, "
    "Tensor keys, Tensor values, int blocks, float epsilon"
)
torch.library.define("brt::state_scan", f"({_ARGUMENTS}) -> Tensor[]")
torch.library.define("brt::state_scan_backward", f"({_ARGUMENTS}, Tensor[] saved, Tensor[] d_results) -> Tensor[]")
torch.library.register_fake("brt::state_scan")(lambda *arguments: _Inputs(*arguments).room())


@torch.library.impl("brt::state_scan", "CPU")
def _state_scan(*arguments: Any) -> list[Tensor]:
    given = _Inputs(*arguments)
    results = given.room()
    states, keys, values, *saved = results
    B, S, _, H, K, _, T = given.sizes
    _forward(*given.for_c(states, *saved), *(tensor(x, (T * B, H, S, K)) for x in (keys, values)))
    return results


@torch.library.register_fake("brt::state_scan_backward")
def _backward_room(*arguments: Any) -> list[Tensor]:
    given = _Inputs(*arguments[:12])
    return [*(torch.empty_like(x) for x in given[:8]), tokens_first(given.keys), tokens_first(given.values)]


@torch.library.impl("brt::state_scan_backward", "CPU")
def _state_scan_backward(*arguments: Any) -> list[Tensor]:
    given, (saved, d_results) = _Inputs(*arguments[:12]), arguments[12:]
    B, S, D, H, K, W, T = given.sizes
    states, x, joined, attention, *rest = saved
    new, HK = given.state.new_empty, H * K
    d_state, d_joined, d_candidate = new(B, S, D), new(T, B, S, 4 * HK), new(T, B, S, D)
    sums = new(B, D), new(B, S, D), new(B, 3 * H), new(B, D)
    d_rows = tokens_first(given.keys), tokens_first(given.values)
    d_states, *d_views = (None if d.numel() == 0 else d for d in d_results)
    none = TensorArgument(None, 0, 0, 0)
    _backward(
        *given.for_c(states, x, joined, attention, *rest),
        pointer(d_states, (T, B, S, D)),
        *(none if d is None else tensor(d, (T * B, H, S, K)) for d in d_views),
        pointer(d_state, (B, S, D)),
        *(tensor(d, (B, H, (1 + T) * W, K)) for d in d_rows),
        _Sums(*(pointer(total, tuple(total.shape)) for total in sums)),
        *(pointer(d_joined, (T, B, S, 4 * HK)), pointer(d_candidate, (T, B, S, D))),
    )
    d_norm, d_ids, d_scales, d_keep = (total.sum(0) for total in sums)
    d_joined, d_candidate = d_joined.view(-1, 4 * HK), d_candidate.view(-1, D)
    d_projection, d_map = d_joined.T @ x.view(-1, D), d_candidate.T @ attention.view(-1, 2 * HK)
    return [d_state, d_norm, d_ids, d_projection, d_scales, d_map, d_candidate.sum(0), d_keep, *d_rows]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    states, _, _, *saved = output
    ctx.save_for_backward(*inputs[:10], states, *saved)
    ctx.constants = inputs[10:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    given, saved = ctx.saved_tensors[:10], list(ctx.saved_tensors[10:])
    d_states, *d_views = (saved[0].new_empty(0) if d is None else d for d in grads[:3])
    d_results = [d_states.contiguous(), *(with_rows(d) for d in d_views)]
    return *torch.ops.brt.state_scan_backward(*given, *ctx.constants, saved, d_results), None, None


torch.library.register_autograd("brt::state_scan", _gradients, setup_context=_save)
once_differentiable("brt::state_scan_backward")

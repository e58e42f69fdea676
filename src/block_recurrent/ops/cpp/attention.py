"""Attention by the kernel in `attention.c`: over a sliding window, or of groups of queries over all of their keys."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    tensors,
    tokens_first,
    with_rows,
)

SIDE = 32
"""Padding of minus infinity on both sides of the bias; as in C."""


def cpp_window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, fixed_keys: int = 0) -> Tensor:
    """q (B, H, N, K), bias (H, W), k and v (B, H, W + N, K) -> (B, H, N, K).

    The first `fixed_keys` keys and values get no gradient.
    """
    padded = F.pad(bias, (SIDE, SIDE), value=float("-inf")).contiguous()
    inputs = with_rows(q), with_rows(k), with_rows(v), padded, _seed(dropout)
    return torch.ops.brt.window_attention(*inputs, dropout, fixed_keys)[0]


def cpp_attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], dropout: float) -> Tensor:
    """q (B, H, groups * N, K), keys and values (B, H, M, K) of each group -> like q."""
    if q.shape[2] == 0:  # a call without tokens, which only sets the initial state of new lanes
        return torch.zeros_like(q)
    rows = [with_rows(x) for x in keys], [with_rows(x) for x in values]
    return torch.ops.brt.attend(with_rows(q), *rows, _seed(dropout), dropout)[0]


def _seed(dropout: float) -> Tensor:
    # The mask is drawn from a seed, and again in the backward pass. A tensor, for torch.compile.
    return torch.randint(2**62, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)


class _Shape(ctypes.Structure):
    """As in C."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("B", "H", "N", "K", "W", "slide", "groups", "pieces", "fixed_keys")),
        ("dropout", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int),
    )


_forward = Kernel("attention", _Shape, TensorArgument, *3 * [POINTER], TensorArgument, POINTER)
_backward = Kernel(
    "attention_backward",
    *(_Shape, TensorArgument, *3 * [POINTER], TensorArgument, POINTER, *2 * [TensorArgument], *3 * [POINTER]),
)


class Attention(NamedTuple):
    """A call of the kernel: queries (B, H, groups * N, K), and for each group its keys and values in pieces."""

    q: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    bias: Tensor | None = None
    """(H, SIDE + W + SIDE); None: nothing slides, and every query sees all keys of its group."""
    groups: int = 1
    dropout: float = 0.0
    seed: int = 0
    fixed_keys: int = 0

    def into(self, out: Tensor) -> Tensor:
        """The result, into `out`; returns the logarithms of the sums of softmax, which gradients need."""
        shape = tuple(self.q.shape)
        log_sums = self.q.new_empty(shape[:3])
        _forward(*self._checked(), tensor(out, shape), pointer(log_sums, shape[:3]))
        return log_sums

    def gradients_into(
        self,
        dq: Tensor,
        d_keys: Sequence[Tensor],
        d_values: Sequence[Tensor],
        d_bias: Tensor | None,
        saved: tuple[Tensor, Tensor],
        d_out: Tensor,
    ) -> None:
        """Gradients, into tensors like the inputs; `saved`: the result and the logarithms."""
        (out, log_sums), shape, rows = saved, tuple(self.q.shape), tuple(self.keys[0].shape)
        _backward(
            *self._checked(),
            *(tensor(out, shape), pointer(log_sums, shape[:3]), tensor(d_out, shape), tensor(dq, shape)),
            *(tensors(d_keys, rows), tensors(d_values, rows)),
            None if d_bias is None or self.bias is None else pointer(d_bias, (shape[0], *self.bias.shape)),
        )

    def _checked(self) -> tuple[Any, ...]:
        """Shape, queries, keys, values and bias for C."""
        B, H, queries, K = self.q.shape
        N, pieces = queries // self.groups, len(self.keys) // self.groups
        rows = tuple(self.keys[0].shape)
        W = rows[2] * pieces if self.bias is None else self.bias.shape[1] - 2 * SIDE
        counts = N * self.groups == queries and pieces * self.groups == len(self.keys) == len(self.values)
        if not (N > 0 and W > 0 and counts and 0 <= self.dropout < 1 and 0 <= self.fixed_keys <= rows[2]):
            check(False, f"N {N}, W {W}, dropout {self.dropout}")
        shape = _Shape(
            *(B, H, N, K, W, self.bias is not None, self.groups, pieces, self.fixed_keys),
            *(self.dropout, self.seed, torch.get_num_threads()),
        )
        expected = B, H, rows[2] if self.bias is None else W + N, K
        arrays = tensors(self.keys, expected), tensors(self.values, expected)
        return shape, tensor(self.q, (B, H, queries, K)), *arrays, pointer(self.bias, (H, W + 2 * SIDE))


# ---- Over a window ---------------------------------------------------------------------------------------------------

_WINDOW = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor seed, float dropout, int fixed_keys"
torch.library.define("brt::window_attention", f"({_WINDOW}) -> (Tensor, Tensor)")
torch.library.define(
    "brt::window_attention_backward",
    f"({_WINDOW}, Tensor out, Tensor log_sums, Tensor d_out) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _over_window(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: Tensor, dropout: float, fixed_keys: int
) -> Attention:
    return Attention(q, [k], [v], bias, dropout=dropout, seed=int(seed), fixed_keys=fixed_keys)


@torch.library.register_fake("brt::window_attention")
def _room(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(q), q.new_empty(q.shape[:3])


@torch.library.impl("brt::window_attention", "CPU")
def _window_attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = tokens_first(q)
    return out, _over_window(q, *rest).into(out)


@torch.library.register_fake("brt::window_attention_backward")
def _window_backward_room(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = q.new_empty(q.shape[0], *bias.shape)
    return tokens_first(q), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


@torch.library.impl("brt::window_attention_backward", "CPU")
def _window_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, out, log_sums, d_out = arguments
    dq, dk, dv, d_bias = _window_backward_room(*inputs)
    _over_window(*inputs).gradients_into(dq, [dk], [dv], d_bias, (out, log_sums), d_out)
    return dq, dk, dv, d_bias


def _save_window(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.constants = inputs[5:]
    ctx.set_materialize_grads(False)


def _window_gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, log_sums = ctx.saved_tensors
    dq, dk, dv, d_bias = torch.ops.brt.window_attention_backward(
        *inputs, *ctx.constants, out, log_sums, with_rows(d_out)
    )
    return dq, dk, dv, d_bias.sum(0), None, None, None


torch.library.register_autograd("brt::window_attention", _window_gradients, setup_context=_save_window)

# ---- Over all keys of a group ----------------------------------------------------------------------------------------

_GROUPS = "Tensor q, Tensor[] keys, Tensor[] values, Tensor seed, float dropout"
torch.library.define("brt::attend", f"({_GROUPS}) -> (Tensor, Tensor)")
torch.library.define(
    "brt::attend_backward",
    f"({_GROUPS}, Tensor out, Tensor log_sums, Tensor d_out) -> (Tensor, Tensor[], Tensor[])",
)
torch.library.register_fake("brt::attend")(_room)


def _over_groups(q: Tensor, keys: list[Tensor], values: list[Tensor], seed: Tensor, dropout: float) -> Attention:
    return Attention(q, keys, values, groups=len(keys), dropout=dropout, seed=int(seed))


@torch.library.impl("brt::attend", "CPU")
def _attend(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = tokens_first(q)
    return out, _over_groups(q, *rest).into(out)


@torch.library.register_fake("brt::attend_backward")
def _attend_backward_room(
    q: Tensor, keys: list[Tensor], values: list[Tensor], *_: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return tokens_first(q), [tokens_first(x) for x in keys], [tokens_first(x) for x in values]


@torch.library.impl("brt::attend_backward", "CPU")
def _attend_backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    *inputs, out, log_sums, d_out = arguments
    dq, d_keys, d_values = _attend_backward_room(*inputs)
    _over_groups(*inputs).gradients_into(dq, d_keys, d_values, None, (out, log_sums), d_out)
    return dq, d_keys, d_values


def _save_groups(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, keys, values, seed, ctx.dropout = inputs
    ctx.save_for_backward(q, seed, *output, *keys, *values)
    ctx.set_materialize_grads(False)


def _group_gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, seed, out, log_sums, *rows = ctx.saved_tensors
    groups = len(rows) // 2
    inputs = q, rows[:groups], rows[groups:], seed, ctx.dropout
    return *torch.ops.brt.attend_backward(*inputs, out, log_sums, with_rows(d_out)), None, None


torch.library.register_autograd("brt::attend", _group_gradients, setup_context=_save_groups)
once_differentiable("brt::window_attention_backward", "brt::attend_backward")

"""Checks of the inputs of a call. Nothing is broadcast silently; every message names the value and the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from block_recurrent.errors import InputError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none


def check_tokens(tokens: Tensor, vocab_size: int, device: torch.device, name: str = "tokens") -> None:
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name} is a {type(tokens).__name__}: it must be a tensor of integers, (lanes, length)")
    if tokens.dtype not in _INTEGERS:
        raise InputError(f"{name} has dtype {_dtype(tokens)}: it must be an integer type, such as int64")
    if tokens.ndim != 2 or tokens.shape[0] == 0:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}: it must be (lanes, length), with at least one lane")
    if tokens.device != device:
        raise InputError(f"{name} is on {tokens.device}, the model on {device}: move one of them")
    if _is_exporting():
        raise InputError(
            "torch.export can't trace this model: where lanes stand in their documents are numbers, not tensors; use "
            "torch.compile on its layers (brt train --compile), or 'brt export' for its weights"
        )
    if tokens.is_cpu:  # on a GPU this would synchronize: tokens are checked before they are moved there
        check_range(tokens, vocab_size, name)


def check_range(tokens: Tensor, vocab_size: int, name: str) -> None:
    """Raise an error if a token is outside the vocabulary."""
    low, high = (bound.item() for bound in tokens.aminmax()) if tokens.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise InputError(f"{name} has {worst}: tokens must be from 0 to vocab_size - 1 = {vocab_size - 1}")


def check_dtype(values: Tensor, dtypes: Sequence[torch.dtype], name: str, more: str = "") -> None:
    if not isinstance(values, Tensor) or values.dtype not in dtypes:
        found = _dtype(values) if isinstance(values, Tensor) else type(values).__name__
        wanted = "an integer type" if dtypes == _INTEGERS else " or ".join(map(_name, dtypes))
        raise InputError(f"{name} is {found}: it must be a tensor of dtype {wanted}{more}")


def check_lanes(values: Tensor, lanes: int, dtypes: Sequence[torch.dtype], name: str) -> None:
    """A tensor (lanes,) of one of the types."""
    check_dtype(values, dtypes, name, ", one entry per lane")
    if tuple(values.shape) != (lanes,):
        raise InputError(f"{name} has shape {tuple(values.shape)}: it must be ({lanes},), one entry per lane of tokens")


def starts_of(starts: Tensor | None, lanes: int) -> list[bool]:
    """The lanes that start a document, as plain booleans."""
    if starts is None:
        return [False] * lanes
    check_lanes(starts, lanes, (torch.bool,), "starts")
    return starts.tolist()


def lengths_of(lengths: Tensor | None, lanes: int, num_tokens: int) -> tuple[int, ...]:
    """The number of real tokens in each lane, as plain numbers."""
    if lengths is None:
        return (num_tokens,) * lanes
    check_lanes(lengths, lanes, _INTEGERS, "lengths")
    for lane, length in enumerate(lengths.tolist()):
        if not 0 <= length <= num_tokens:
            raise InputError(
                f"lengths has {length} for lane {lane}: it must be from 0 to {num_tokens}, the number of tokens"
            )
    return tuple(lengths.tolist())


def check_same_shape(values: Tensor, tokens: Tensor, name: str, dtypes: Sequence[torch.dtype]) -> None:
    """A tensor of the shape of tokens."""
    check_dtype(values, dtypes, name)
    if values.shape != tokens.shape:
        raise InputError(
            f"{name} has shape {tuple(values.shape)}: it must be the shape of tokens, {tuple(tokens.shape)}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(x: Tensor) -> str:
    return _name(x.dtype)

"""What is worked out from weights, kept from token to token while writing, until the weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")
Stamp = list[int]


def stamp(*weights: Tensor) -> Stamp | None:
    """Changes whenever one of the weights does: torch counts the changes of every tensor. None: it doesn't, for these.

    Changes of sharded weights, and those made through `.data`, are not counted.
    """
    try:
        return [number for weight in weights for number in (weight.data_ptr(), weight._version)]
    except RuntimeError:  # those made in inference mode
        return None


class Kept(Generic[Value]):
    """The outcome of some work on weights alone. Not for training, where it has a gradient."""

    def __init__(self) -> None:
        self._kept: tuple[Stamp, Value] | None = None

    def get(self, work: Callable[[], Value], *weights: Tensor) -> Value:
        """`work()`, or what it gave when the weights were the same."""
        now = None if torch.is_grad_enabled() else stamp(*weights)
        if now is None:
            return work()
        if self._kept is None or now != self._kept[0]:
            self._kept = (now, work())
        return self._kept[1]

    def __reduce__(self) -> tuple[type[Kept[Value]], tuple[()]]:
        return Kept, ()  # a copy begins empty

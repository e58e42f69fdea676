"""What is worked out from weights, kept from token to token while writing, until the weights change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Stamp = tuple[tuple[int, int], ...]


def stamp(*weights: Tensor) -> Stamp | None:
    """Changes whenever one of the weights does: torch counts the changes of every tensor. None: it doesn't, for these.

    Changes of sharded weights, and those made through `.data`, are not counted.
    """
    if any(weight.is_inference() for weight in weights):
        return None
    return tuple((weight.data_ptr(), weight._version) for weight in weights)


class Kept:
    """The outcome of some work on weights alone. Not for training, where it has a gradient."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._stamp: Stamp | None = None

    def get(self, work: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        """`work()`, or what it gave when the weights were the same."""
        now = None if torch.is_grad_enabled() else stamp(*weights)
        if now is None:
            return work()
        if self._value is None or now != self._stamp:
            self._value, self._stamp = work(), now
        return self._value

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()  # a copy begins empty

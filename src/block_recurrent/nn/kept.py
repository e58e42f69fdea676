"""What is worked out from weights alone, kept from token to token while writing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Kept:
    """The outcome of some work on weights, until one of them changes: torch counts the changes of every tensor.

    Not for training, where the outcome has a gradient, and not for sharded weights, which change uncounted.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._weights: tuple[tuple[int, int], ...] = ()

    def get(self, work: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        """`work()`, or what it gave when the weights were the same."""
        if torch.is_grad_enabled() or any(weight.is_inference() for weight in weights):
            return work()
        now = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if self._value is None or now != self._weights:
            self._value, self._weights = work(), now
        return self._value

    def __deepcopy__(self, memo: object) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()

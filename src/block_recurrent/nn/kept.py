"""What is worked out from weights, kept from token to token while writing, until the weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn

Value = TypeVar("Value")


class Watch:
    """Notices changes of modules: of their weights, of their parts, and of who listens to their calls.

    torch counts the changes of every tensor. It doesn't count those of sharded weights, and those made through `.data`.
    """

    def __init__(self, *modules: nn.Module) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._parts = [
            (owner, name, part)
            for module in parts
            for owner in (module._parameters, module._modules)
            for name, part in owner.items()
        ]
        self._weights = [weight for module in parts for weight in module._parameters.values() if weight is not None]
        self._listeners = [hooks for module in parts for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._before = self._now()

    def _now(self) -> list[int] | None:
        try:
            numbers = [number for weight in self._weights for number in (weight.data_ptr(), weight._version)]
        except RuntimeError:  # weights made in inference mode: their changes are not counted
            return None
        return numbers + list(map(len, self._listeners))

    def changed(self) -> bool:
        """Whether anything is not as it was, or can't be known to be."""
        now = self._now()
        return not now or now != self._before or any(owner.get(name) is not part for owner, name, part in self._parts)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()  # a copy watches nothing, and so has always changed


class Kept(Generic[Value]):
    """The outcome of some work on the weights of modules. Not for training, where it has a gradient."""

    def __init__(self) -> None:
        self._kept: tuple[Watch, Value] | None = None

    def get(self, work: Callable[[], Value], *modules: nn.Module) -> Value:
        """`work()`, or what it gave when the modules were the same."""
        if torch.is_grad_enabled():
            return work()
        if self._kept is None or self._kept[0].changed():
            self._kept = (Watch(*modules), work())
        return self._kept[1]

    def __reduce__(self) -> tuple[type[Kept[Value]], tuple[()]]:
        return Kept, ()  # a copy begins empty

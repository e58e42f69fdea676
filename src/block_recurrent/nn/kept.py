"""What is worked out from weights, kept from token to token while writing, until the weights change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
_version = attrgetter("_version")


class Watch:
    """Notices changes of modules: of their weights, of their parts, and of who listens to their calls.

    torch counts the changes of every tensor. It doesn't count those of sharded weights, and those made through `.data`.
    """

    def __init__(self, *modules: nn.Module) -> None:
        parts = [part for module in modules for part in module.modules()]
        # torch's own dictionaries, so that what is put into them later is seen.
        self._weights = [part._parameters for part in parts if part._parameters]
        self._parts = [part._modules for part in parts if part._modules]
        self._listeners = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        # Held, so that nothing new can come to lie where they are.
        self._held = [*parts, *(weight for part in parts for weight in part._parameters.values())]
        self._before = self._now()

    def _now(self) -> list[int] | None:
        # Mostly in C: this is done in every layer for every token.
        weights = [weight for weight in chain.from_iterable(map(dict.values, self._weights)) if weight is not None]
        parts = chain.from_iterable(map(dict.values, self._parts))
        try:
            versions = [*map(_version, weights)]
        except RuntimeError:  # weights made in inference mode: their changes are not counted
            return None
        return [*versions, *map(Tensor.data_ptr, weights), *map(id, parts), *map(len, self._listeners)]

    def changed(self) -> bool:
        """Whether anything is not as it was, or can't be known to be."""
        now = self._now()
        return now is None or now != self._before or not self._weights

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

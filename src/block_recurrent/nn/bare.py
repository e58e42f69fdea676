"""What a module does, without its call.

Around every call of a module, torch looks up weights and hooks. For a segment that is nothing; for a single token it
takes longer than a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]


@runtime_checkable
class HasBare(Protocol):
    """A module that can tell what it does as a function of its present weights."""

    def bare(self) -> Function: ...


def bare(module: nn.Module) -> Function:
    """A function that does what the module does, for as long as a `Watch` on it notices no change."""
    listened_to = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl is not None
    if not listened_to and type(module) is nn.Linear and module.bias is None:
        return partial(F.linear, weight=module.weight)
    if not listened_to and isinstance(module, HasBare):
        return module.bare()
    return cast(Function, module)

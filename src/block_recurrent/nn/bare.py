"""What a module does, without its call.

Around every call of a module, torch looks up weights and hooks. For a segment that is nothing; for a single token it
takes longer than a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]


def bare(module: nn.Module) -> Function:
    """A function that does what the module does, for as long as a `Watch` on it notices no change.

    The module itself, where nothing shorter is known to do the same: somebody listens to its calls, its `forward` was
    replaced, or its class (not one that it is derived from) has no method `bare`.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl or "forward" in vars(module):
        return cast(Function, module)
    if type(module) is nn.Linear and module.bias is None:
        return partial(F.linear, weight=module.weight)
    method = vars(type(module)).get("bare")
    return cast(Function, module if method is None else method(module))

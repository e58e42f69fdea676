"""What a module does, without its call.

Around every call of a module, torch looks up weights and hooks. For a segment that is nothing; for a single token it
takes longer than a norm.
"""

from __future__ import annotations

from typing import Any, TypeGuard, cast

from torch import nn

from block_recurrent.nn.rows import AddTo, Function, adding_times, times


def bare(module: nn.Module) -> Function:
    """A function that does what the module does to rows, for as long as a `Watch` on it notices no change.

    The module itself, where nothing shorter is known to do the same: somebody listens to its calls, its `forward` was
    replaced, or its class (not one that it is derived from) has no method `bare`.
    """
    if _is_plain_linear(module):
        return times(module.weight, copy=True)
    method = _own_method(module, "bare")
    return cast(Function, module if method is None else method(module))


def adding(module: nn.Module) -> AddTo:
    """(x, y) -> x + what the module does to y: in one call, where the module is known (as in `bare`)."""
    if (method := _own_method(module, "adding")) is not None:
        return cast(AddTo, method(module))
    if _is_plain_linear(module):
        return adding_times(module.weight)
    function = bare(module)
    return lambda x, y: x + function(y)


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.bias is None and _only_its_class_matters(module)


def _own_method(module: nn.Module, name: str) -> Any:
    return vars(type(module)).get(name) if _only_its_class_matters(module) else None


def _only_its_class_matters(module: nn.Module) -> bool:
    """Nobody listens to its calls, and its `forward` was not replaced."""
    listeners = module._forward_hooks or module._forward_pre_hooks
    return not (listeners or module._compiled_call_impl or "forward" in vars(module))

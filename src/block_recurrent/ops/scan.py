"""The recurrent state through all blocks of a call: the only sequential part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from block_recurrent.ops import registry
from block_recurrent.ops.attention import StateView, StateWeights, state_step
from block_recurrent.ops.cpp.scan import cpp_state_scan
from block_recurrent.ops.norm import EPSILON
from block_recurrent.ops.precision import product_dtype

KeysValues = tuple[Tensor, Tensor]
"""What tokens read of a state: (B, H, S, K) each."""
Update = Callable[[Tensor, Tensor], Tensor]
"""From attention (B, S, 2HK) and state (B, S, D) to the next state. A module may state that it is an `average`."""


class Average(NamedTuple):
    """An update that is an average: state * keep + (map attention + bias) * (1 - keep)."""

    map: Tensor
    """(D, 2HK)"""
    bias: Tensor
    """(D,)"""
    keep: Tensor
    """(D,)"""


def state_scan(
    state: Tensor,
    weights: StateWeights,
    update: Update,
    keys: Tensor,
    values: Tensor,
    blocks: int,
    view: StateView | None = None,
) -> tuple[list[KeysValues], list[Tensor]]:
    """Keys and values of the state before each block, and the states: the given one, and that after each block.

    keys and values (B, H, (1 + blocks) W, K): of the tokens, those of the block before the first included; `view`: that
    of the given state, if it is known.
    """
    average = stated(update, "average") if view is None and blocks else None
    if average is not None and _backend(state, weights, average, keys, blocks) == "cpp":
        after, *rows = cpp_state_scan(state, (*weights, *average), keys, values, blocks, EPSILON)
        pairs = zip(*(x.unbind(0) for x in rows), strict=True)
        return list(pairs), [state, *after.unbind(0)]
    # A single unbind: with a slice per block, the backward pass would fill and add the whole buffer for each block.
    # The two blocks of block feedback stay together.
    parts = 1 + blocks if blocks > 1 else 1
    key_blocks, value_blocks = (x.unflatten(2, (parts, -1)).unbind(2) for x in (keys, values))
    states, read = [state], []
    for block in range(blocks):
        pair = slice(block, block + 2)  # a block is read with the one before it
        view, attention = state_step(states[-1], weights, key_blocks[pair], value_blocks[pair], view)
        states.append(update(attention, states[-1]))
        read.append((view.keys, view.values))
        view = None
    return read, states


def stated(module: object, name: str) -> Any:
    """What a module states of itself by the method `name`. None where it has to be called, since that may not be true:
    its class only inherits the method, or the module itself was changed.
    """
    statement = vars(type(module)).get(name)
    if statement is None or not isinstance(module, nn.Module) or is_changed(module):
        return None
    return statement(module)


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` other than that of its class."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _backend(state: Tensor, weights: StateWeights, average: Average, keys: Tensor, blocks: int) -> str:
    _, states, width = state.shape
    if states % 8 or width % 16 or keys.shape[3] % 16:
        return registry.REFERENCE
    mixed = product_dtype(state) != state.dtype or any(x.dtype != state.dtype for x in (*weights, *average, keys))
    most = max(states, 2 * keys.shape[2] // (1 + blocks))
    return registry.select("state_scan", state, width=width, keys=most, mixed=mixed)

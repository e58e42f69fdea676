"""Experiments on the recurrent state: reset, frozen, or swapped, at block boundaries, with the window cache kept.

A memory is a value, and at a block boundary it contains the whole recurrent state; so an experiment on the state needs
no change of the model: the scorer ends its calls at the boundaries that an edit names, and the edit replaces the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError
from block_recurrent.inference.engine import Engine, engine_of
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

States = dict[int, Tensor]  # by layer (counted from 0), the state vectors (S, D) of one lane


class LanePosition(NamedTuple):
    """The position of a lane: the next token of a document."""

    document: int
    position: int


class StateEdit(ABC):
    """A change of the recurrent state at some block boundaries of every document."""

    @abstractmethod
    def next_border(self, position: int) -> int:
        """The first position after this one at which to change the state."""

    @abstractmethod
    def new_states(self, place: LanePosition, states: States) -> States:
        """The new state at this position, or the same states."""

    def apply(self, memory: DocumentMemory, places: Sequence[LanePosition]) -> DocumentMemory:
        """The memory with the state changed in the lanes that are at a boundary."""
        at_border = [p.position > 0 and self.next_border(p.position - 1) == p.position for p in places]
        if not any(at_border):
            return memory
        changed = {i: layer.state.clone() for i, layer in enumerate(memory.layers) if layer.state is not None}
        for lane, place in enumerate(places):
            if at_border[lane]:
                for i, state in self.new_states(place, {i: x[lane] for i, x in changed.items()}).items():
                    changed[i][lane] = state
        layers = [replace(layer, state=changed.get(i)) for i, layer in enumerate(memory.layers)]
        return replace(memory, layers=tuple(layers))


class ReplaceState(StateEdit):
    """Every `period` tokens, replace the state, or only the vectors `which` of a layer."""

    def __init__(self, period: int, states: States, which: dict[int, Tensor] | None = None) -> None:
        self.period, self.states, self.which = period, states, which

    def next_border(self, position: int) -> int:
        return (position // self.period + 1) * self.period

    def new_states(self, place: LanePosition, states: States) -> States:
        if self.which is None:
            return self.states
        changed = {}
        for layer, chosen in self.which.items():
            changed[layer] = states[layer].clone()
            changed[layer][chosen] = self.states[layer][chosen]
        return changed


class FreezeState(StateEdit):
    """Keep the state of position `first` from there on. Restored after every block, which needs short calls."""

    def __init__(self, first: int, window: int) -> None:
        self.first, self.window = first, window
        self._held: dict[int, States] = {}

    def next_border(self, position: int) -> int:
        return self.first if position < self.first else (position // self.window + 1) * self.window

    def apply(self, memory: DocumentMemory, places: Sequence[LanePosition]) -> DocumentMemory:
        open_documents = {place.document for place in places}
        self._held = {document: states for document, states in self._held.items() if document in open_documents}
        return super().apply(memory, places)

    def new_states(self, place: LanePosition, states: States) -> States:
        if place.position == self.first:
            self._held[place.document] = {i: x.clone() for i, x in states.items()}
        return self._held[place.document]


def initial_states(model: BlockRecurrentLM) -> States:
    """The learned initial state."""
    cells = {i: layer.cell for i, layer in enumerate(model.layers) if isinstance(layer.cell, RecurrentCell)}
    return {i: cell.initial_state.detach() for i, cell in cells.items()}


def clear_every(model: BlockRecurrentLM, period: int) -> ReplaceState:
    """Reset the state every `period` tokens."""
    check_recurrent(model.config)
    check_period(period, model.config.window, "--clear-every")
    return ReplaceState(period, initial_states(model))


def freeze_after_first_segment(model: BlockRecurrentLM) -> FreezeState:
    """Do not update the state after a document's first segment."""
    check_recurrent(model.config)
    return FreezeState(model.config.segment, model.config.window)


def states_after(model: BlockRecurrentLM | Engine, tokens: NDArray[Any]) -> States:
    """The final state of a document: after its last whole block. `tokens` (n,) include its document mark."""
    check_recurrent(model.config)
    _, memory = engine_of(model).prefill([tokens])
    return {i: layer.state[0] for i, layer in enumerate(memory.layers) if layer.state is not None}


def check_recurrent(config: ModelConfig) -> None:
    """Raise an error unless the model has a recurrent state."""
    if not config.recurrent_layers:
        raise ConfigError(
            "this model has no recurrent state: its recurrent_layers is empty; choose a run of a rec- or "
            "feedback- system"
        )


def check_period(period: int, window: int, flag: str) -> None:
    """Raise an error unless the period ends at block boundaries, the only positions where the state is defined."""
    if period < window or period % window:
        nearest = max(1, round(period / window)) * window
        raise ConfigError(
            f"{flag} {period}: it must be a multiple of the model's window {window}, since the state changes only at "
            f"block boundaries; try {nearest}"
        )

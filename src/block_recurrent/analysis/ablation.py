"""Ablation of state vectors: the loss without some of them.

A vector is ablated by resetting it to its initial value at every block, so that it carries no information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from block_recurrent.analysis.inspector import Inspection
from block_recurrent.evaluate.scoring import score
from block_recurrent.evaluate.state_edits import LanePosition, StateEdit, States, initial_states
from block_recurrent.io.progress import Progress
from block_recurrent.model.language_model import BlockRecurrentLM

ABLATION_RULE = (
    "a state vector is ablated by resetting it to its initial value at every block; most and least read: by the "
    "tokens' mean attention over the document"
)


@dataclass(frozen=True)
class Ablation:
    """Bits per token without `count` vectors of a layer's state."""

    layer: int
    count: int
    normal: float
    most_read: float
    least_read: float


class _TakeAway(StateEdit):
    """Resets different vectors in each lane: all lanes read the same document, without `chosen[document]`."""

    def __init__(self, window: int, states: States, chosen: list[tuple[int, NDArray[np.int64]] | None]) -> None:
        self.window, self.states, self.chosen = window, states, chosen

    def next_border(self, position: int) -> int:
        return (position // self.window + 1) * self.window

    def new_states(self, place: LanePosition, states: States) -> States:
        choice = self.chosen[place.document]
        if choice is None:
            return {}
        layer, vectors = choice
        changed = states[layer].clone()
        changed[torch.from_numpy(vectors)] = self.states[layer][torch.from_numpy(vectors)]
        return {layer: changed}


def ablate(
    model: BlockRecurrentLM,
    tokens: NDArray[Any],
    inspection: Inspection,
    progress: Progress | None = None,
) -> list[Ablation]:
    """The loss without the 1, 4, 16, ... most read, and least read, vectors of each recurrent layer."""
    variants: list[tuple[int, NDArray[np.int64]] | None] = [None]
    counts = ablation_counts(model.config.num_states)
    for layer in inspection.layers:
        order = np.array(layer.by_reading, np.int64)
        for count in counts:
            variants += [(layer.layer - 1, order[:count]), (layer.layer - 1, order[-count:])]
    edit = _TakeAway(model.config.window, initial_states(model), variants)
    bits = np.zeros(len(variants))
    for piece in score(model, [tokens] * len(variants), lanes=len(variants), edit=edit, progress=progress):
        bits[piece.document] += piece.bits.sum()
    per_token = iter((bits / max(1, len(tokens))).tolist())
    normal = next(per_token)
    return [
        Ablation(layer.layer, count, normal, next(per_token), next(per_token))
        for layer in inspection.layers
        for count in counts
    ]


def ablation_counts(num_states: int) -> list[int]:
    """1, 4, 16, ... and all."""
    counts = [4**power for power in range(12) if 4**power < num_states]
    return [*counts, num_states]

"""Metrics of the recurrent layers during training: mean gate activations, and norms of the states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.nn.gates import Gate
from block_recurrent.train.sharding import whole


class GateActivations:
    """Mean activations of every gate over the blocks of a step.

    An LSTM gate depends on its input: a hook recomputes its gates for the first lane, a share of 1/B of the gate's own
    cost. A fixed gate has no hook: kernels that compute it without calling the module can be used. Names are
    `layer3/attention_gate/keep`: the share of the old state that is kept (fixed), or `.../forget` and `.../input`
    (lstm). Compiled layers are skipped: a hook would break their graph.
    """

    def __init__(self, model: BlockRecurrentLM) -> None:
        self._sums: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._fixed: list[tuple[str, Gate]] = []
        for number, layer in enumerate(model.layers, start=1):
            for name, gate in layer.named_modules():
                if not isinstance(gate, Gate):
                    continue
                title = f"layer{number}/{name.split('.')[-1]}"
                if gate.depends_on_input:
                    gate.register_forward_hook(self._hook(title))
                else:
                    self._fixed.append((title, gate))

    def _hook(self, name: str) -> Callable[[Gate, Any, Any], None]:
        def hook(gate: Gate, args: tuple[Tensor, ...], _: Tensor) -> None:
            if torch.compiler.is_compiling() or not gate.training:
                return
            if torch._C._current_graph_task_id() == -1:  # otherwise this is a recomputation in the backward pass
                self._add(name, gate, args[0])

        return hook

    @torch.no_grad()
    def _add(self, name: str, gate: Gate, h: Tensor) -> None:
        for kind, mean in gate.activations(h[:1]).items():
            key = f"{name}/{kind}"
            self._sums[key] = self._sums[key] + mean if key in self._sums else mean
            self._calls[key] = self._calls.get(key, 0) + 1

    def take(self) -> dict[str, Tensor]:
        """The means since the last call; those of fixed gates as they are now."""
        for name, gate in self._fixed:
            self._add(name, gate, next(gate.parameters()))
        means = {key: whole(total).float() / self._calls[key] for key, total in self._sums.items()}
        self._sums, self._calls = {}, {}
        return means


def state_norms(memories: list[DocumentMemory]) -> dict[str, Tensor]:
    """Per recurrent layer, the mean norm of a state vector over lanes and states."""
    norms: dict[str, Tensor] = {}
    for index in range(len(memories[0].layers)):
        states = [state for memory in memories if (state := memory.layers[index].state) is not None]
        if states:
            norms[f"layer{index + 1}/state_norm"] = torch.stack([x.norm(dim=-1).mean() for x in states]).mean()
    return norms

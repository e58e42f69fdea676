"""Inspection of the recurrent state while a document is read: gates, reads and writes, block by block.

The document is read one block per call. Between calls the state is in the memory, so the model needs no
change: attention to the state is recomputed from the inputs of the layer, and gates from their inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from block_recurrent.evaluate.state_edits import check_recurrent, initial_states
from block_recurrent.inference.engine import Engine
from block_recurrent.io.progress import Progress
from block_recurrent.model.cell import RecurrentCell
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.layer import Layer
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.nn.gates import Gate
from block_recurrent.ops import split_heads, unit_length

MOST_CHANGED = 10


@dataclass(frozen=True)
class LayerInspection:
    """One recurrent layer over the T blocks of a document."""

    layer: int  # counted from 1
    gates: dict[str, NDArray[np.float64]]
    """(T,) mean activations by gate: `keep` of a fixed gate, `forget` and `input` of an LSTM gate."""
    state_norm: NDArray[np.float64]  # (T,) mean norm of a state vector after the block
    change: NDArray[np.float64]
    """(T,) norm of the change over norm of the state: the share of the state that the block replaced."""
    read: NDArray[np.float32]
    """(T, S) attention of the block's tokens to each state vector; each row sums to 1."""
    written: NDArray[np.float32]  # (T, S) norm of each state vector's change at the block's end

    @property
    def most_changed(self) -> list[int]:
        """The blocks that changed the state most, most first, without the first, which replaces the initial state."""
        order = np.argsort(-self.change[1:], kind="stable")[:MOST_CHANGED] + 1
        return [int(block) for block in order]

    @property
    def by_reading(self) -> list[int]:
        """The state vectors, most read first."""
        return [int(s) for s in np.argsort(-self.read.sum(0), kind="stable")]


@dataclass(frozen=True)
class Inspection:
    """All recurrent layers over a document; whole blocks only, since the state changes at block ends."""

    name: str
    window: int
    tokens: int
    layers: tuple[LayerInspection, ...]


_Trace = dict[str, list[Any]]
"""Values of a layer, block by block: the fields of `LayerInspection`, and its gates by `gate NAME`."""


@torch.no_grad()
def inspect(
    model: BlockRecurrentLM,
    tokens: NDArray[Any],
    name: str = "document",
    progress: Progress | None = None,
) -> Inspection:
    """Read one document, and record its state block by block.

    Args:
        model: a model with recurrent layers.
        tokens: the document, without its mark.
        name: the name of the document in reports.
        progress: called with the number of tokens done and their total.
    """
    check_recurrent(model.config)
    # A copy: other users must not see the hooks. Not through the engine, whose decode kernel calls no modules.
    model, W = Engine(model).snapshot.model, model.config.window
    first = np.concatenate([[model.config.eos_token_id], tokens]).astype(np.int64)
    read = torch.from_numpy(first).to(model.embedding.weight.device)
    blocks = len(read) // W
    cells = {i: layer.cell for i, layer in enumerate(model.layers) if isinstance(layer.cell, RecurrentCell)}
    traces: dict[int, _Trace] = {i: defaultdict(list) for i in cells}
    states = {i: state[None] for i, state in initial_states(model).items()}
    memory: DocumentMemory | None = None
    with _watched(model, traces) as inputs:
        for block in range(blocks):
            _, memory = model(read[None, block * W : (block + 1) * W], memory)
            for i, trace in traces.items():
                after = memory.layers[i].state
                assert after is not None
                trace["read"].append(_read_shares(model, i, inputs, states[i]))
                _note_change(trace, states[i][0], after[0])
                states[i] = after
            if progress:
                progress((block + 1) * W, blocks * W)
    return Inspection(name, W, blocks * W, tuple(_finish(i + 1, trace, model) for i, trace in traces.items()))


def _note_change(trace: _Trace, before: Tensor, after: Tensor) -> None:
    step = (after - before).norm(dim=-1)
    lengths = after.norm(dim=-1)
    trace["written"].append(step.float().cpu().numpy())
    trace["state_norm"].append(lengths.mean().item())
    trace["change"].append((step.norm() / lengths.norm().clamp(min=1e-12)).item())


def _finish(number: int, trace: _Trace, model: BlockRecurrentLM) -> LayerInspection:
    gates = {name.removeprefix("gate "): np.array(x) for name, x in trace.items() if name.startswith("gate ")}
    maps = (np.array(trace[name], np.float32).reshape(-1, model.config.num_states) for name in ("read", "written"))
    return LayerInspection(number, gates, np.array(trace["state_norm"]), np.array(trace["change"]), *maps)


def _read_shares(model: BlockRecurrentLM, index: int, inputs: dict[int, Tensor], state: Tensor) -> NDArray[np.float32]:
    """The mean attention of the block's tokens to each vector of a layer's state, over all layers that read it."""
    cell = model.layers[index].cell
    assert isinstance(cell, RecurrentCell)
    keys = cell.view(state).keys  # (1, H, S, K)
    shares = []
    for reader in _readers(model, index):
        layer: Any = model.layers[reader]
        queries = split_heads(layer.to_state_queries(inputs[reader]), model.config.num_heads)
        weights = (unit_length(queries, layer.state_scale.abs().view(-1, 1, 1)) @ keys.transpose(-1, -2)).softmax(-1)
        shares.append(weights.mean((0, 1, 2)))
    return torch.stack(shares).mean(0).float().cpu().numpy()


def _readers(model: BlockRecurrentLM, index: int) -> list[int]:
    """The layers (from 0) that read the state of layer `index`: itself, and in block feedback those without their own.

    These read the highest recurrent layer.
    """
    recurrent = [number - 1 for number in model.config.recurrent_layers]
    if model.config.feedback and index == max(recurrent):
        return [i for i in range(model.config.num_layers) if i == index or i not in recurrent]
    return [index]


@contextmanager
def _watched(model: BlockRecurrentLM, traces: dict[int, _Trace]) -> Iterator[dict[int, Tensor]]:
    """Hooks that record the input of each layer's attention, and the activations of gates; removed afterwards."""
    inputs: dict[int, Tensor] = {}

    def keep_input(index: int) -> Callable[..., None]:
        def hook(layer: Layer, args: tuple[Any, ...]) -> None:
            inputs[index] = layer.attention_norm(args[0])

        return hook

    handles = [layer.register_forward_pre_hook(keep_input(i)) for i, layer in enumerate(model.layers)]
    try:
        with watched_gates(model, lambda i, name, mean: traces[i][f"gate {name}"].append(mean)):
            yield inputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watched_gates(model: nn.Module, note: Callable[[int, str, float], None]) -> Iterator[None]:
    """Call `note(layer, gate, mean)`, layers counted from 0, for every gate of every block read in this context."""

    def noting(layer: int, name: str) -> Callable[..., None]:
        def hook(gate: Gate, args: tuple[Tensor, ...], output: Tensor) -> None:
            for kind, mean in gate.activations(args[0]).items():
                note(layer, f"{name} {kind}", mean.item())

        return hook

    layers: Any = model.layers
    handles = [
        module.register_forward_hook(noting(i, name.split(".")[-1]))
        for i, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, Gate)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

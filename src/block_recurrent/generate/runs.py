"""A session from a run's folder: what every command that reads or writes begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from block_recurrent.checkpoint import load_run
from block_recurrent.generate.int8 import quantize
from block_recurrent.generate.session import Session
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.runtime import pick_device


@dataclass(frozen=True)
class RunChoice:
    """Which model, and how it is to compute."""

    run: str
    checkpoint: str = "last"
    device: str = "auto"
    int8: bool = False
    """8-bit weights (CPU)."""
    compile: bool = False
    """torch.compile for the MLPs, which are most of the work."""


def open_session(choice: RunChoice, memory: str | Path | None = None) -> tuple[Session, tuple[str, ...]]:
    """A session of the run's model, fresh or from a memory file; and what the run has to say."""
    device = "cpu" if choice.int8 and choice.device == "auto" else choice.device
    loaded = load_run(choice.run, choice.checkpoint, pick_device(device))
    model: BlockRecurrentLM = quantize(loaded.model) if choice.int8 else loaded.model
    if choice.compile:
        compile_layers(model)
    name = f"{choice.run}, step {loaded.checkpoint.step}{', 8 bits' if choice.int8 else ''}"
    if memory is None:
        return Session(model, loaded.tokenizer, name=name), loaded.notes
    return Session.load(memory, model, loaded.tokenizer, name=name), loaded.notes


def compile_layers(model: BlockRecurrentLM) -> None:
    """Compile the MLPs. A whole layer is not worth it: the memory's places change with every token."""
    for layer in model.layers:
        layer.get_submodule("mlp").compile()

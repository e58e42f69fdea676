"""Files of tuned initial states: the state that documents start from, trained for one kind of text with frozen weights.

`brt train --tune state` writes one; `brt write RUN --state FILE` uses it. It is as large as the recurrent state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from block_recurrent.errors import FileFormatError, MemoryMismatchError
from block_recurrent.io.atomic import atomic_file
from block_recurrent.io.tensors import check_finite, read_tensors, write_tensors
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory_file import hash_tensors

FORMAT, VERSION = "block-recurrent initial state", "1"
INITIAL_STATE = "cell.initial_state"
SHORT = 12


def save_state(model: BlockRecurrentLM, path: Path) -> None:
    """Write the initial states of a model, and the hash of the weights they belong to."""
    states, others = _parts(model)
    seal = {"format": FORMAT, "version": VERSION, "weights": hash_tensors(others), "sha256": hash_tensors(states)}
    try:
        with atomic_file(path) as aside:
            write_tensors(aside, states, seal)
    except OSError as error:
        raise FileFormatError(f"'{path}' can't be written: {error.strerror or error}") from None


def load_state(model: BlockRecurrentLM, path: str | Path) -> None:
    """Load the initial states of a file into the model that they were tuned for; other models are an error."""
    tensors, seal = read_tensors(Path(path), "file of initial states")
    if seal.get("format") != FORMAT or seal.get("version") != VERSION:
        raise FileFormatError(f"'{path}' is not a file of initial states, as made by 'brt train --tune state'")
    if hash_tensors(tensors) != seal.get("sha256"):
        raise FileFormatError(f"'{path}' is damaged: its contents don't match their hash")
    check_finite(tensors)
    states, others = _parts(model)
    if hash_tensors(others) != seal.get("weights"):
        raise MemoryMismatchError(
            f"'{path}' was tuned for weights {str(seal.get('weights'))[:SHORT]}, this model has "
            f"{hash_tensors(others)[:SHORT]}: a state can be used only with the weights that it was tuned for"
        )
    if {name: x.shape for name, x in tensors.items()} != {name: x.shape for name, x in states.items()}:
        raise FileFormatError(f"'{path}' does not contain the initial states of this model")
    with torch.no_grad():
        for name, state in states.items():
            state.copy_(tensors[name])


def _parts(model: BlockRecurrentLM) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The initial states, and all other weights."""
    named = dict(model.named_parameters())
    states: dict[str, Tensor] = {name: p for name, p in named.items() if name.endswith(INITIAL_STATE)}
    if not states:
        raise MemoryMismatchError("this model has no recurrent state: choose a rec- or feedback- system")
    return states, {name: p for name, p in named.items() if name not in states}

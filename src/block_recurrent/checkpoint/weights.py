"""The weights of a run: `load_run` for everybody who reads or writes with it, and one file of them to give away."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from block_recurrent.checkpoint.folders import MANIFEST, Checkpoint, find_checkpoint
from block_recurrent.data import load_tokenizer
from block_recurrent.errors import CheckpointError
from block_recurrent.io.atomic import atomic_file
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.run_config import RunConfig, read_toml

if TYPE_CHECKING:
    from block_recurrent.data import Tokenizer

WEIGHTS = "model.safetensors"
SHARDED = "sharded"
WEIGHT_PREFIX = "model/"
"""Of the names of weights in a sharded checkpoint, which holds other tensors too."""
CONFIG = "config.toml"
TOKENIZER = "tokenizer.model"


@dataclass(frozen=True)
class LoadedRun:
    """What evaluation and generation need of a run."""

    model: BlockRecurrentLM
    config: RunConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
    """Things that a user should be told: a damaged checkpoint that was passed over."""


def load_run(run: str | Path, checkpoint: str | Path = "last", device: torch.device | str = "cpu") -> LoadedRun:
    """The model of a run, ready for reading (eval mode), with its configuration and tokenizer.

    run: the run's folder, or one of its checkpoint folders. checkpoint: "last", "best" (on validation), or a checkpoint
    folder.
    """
    run = Path(run)
    if (run / MANIFEST).is_file():
        run, checkpoint = run.parent.parent, run
    config = RunConfig.from_dict(read_toml(_existing_config(run)))
    found, notes = find_checkpoint(run, checkpoint)
    if found is None:
        raise CheckpointError(f"'{run}' has no checkpoint yet: train it further with 'brt train'")
    model = BlockRecurrentLM(config.model)
    weights = read_weights(found.path)
    check_fits(weights, model.state_dict(), found.path)
    model.load_state_dict(weights)
    tokenizer = load_tokenizer(run / TOKENIZER if (run / TOKENIZER).is_file() else "bytes")
    return LoadedRun(model.to(device).eval(), config, tokenizer, found, tuple(notes))


def export(run: str | Path, out: Path, checkpoint: str | Path = "last") -> LoadedRun:
    """Write the weights of a run as one safetensors file, with the model's configuration in its metadata."""
    loaded = load_run(run, checkpoint)
    header = {"config": json.dumps(loaded.config.model.to_dict()), "step": str(loaded.checkpoint.step)}
    with atomic_file(out) as aside:
        write_tensors(aside, loaded.model.state_dict(), header)
    return loaded


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file; a disk that is full is an OSError."""
    plain = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    try:
        save_file(plain, path, metadata)
        path.chmod(0o644)  # safetensors makes files that only their owner can read
    except SafetensorError as error:
        raise OSError(str(error)) from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint folder, whole, on the CPU."""
    if (path / WEIGHTS).is_file():
        return load_file(path / WEIGHTS)
    from torch.distributed import checkpoint as dcp

    known = dcp.FileSystemReader(path / SHARDED).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(WEIGHT_PREFIX) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    read_sharded(wanted, path)
    return {name.removeprefix(WEIGHT_PREFIX): x for name, x in wanted.items()}


def read_sharded(tensors: dict[str, Any], path: Path) -> None:
    """Fill tensors, sharded or whole, with those of the same names in a sharded checkpoint."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # and we are a single process
        alone = not torch.distributed.is_initialized()
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path / SHARDED), no_dist=alone)


def check_fits(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    """An error that names a weight, unless those of a checkpoint are those of a model."""
    for name in sorted(own.keys() | weights.keys()):
        there, here = (tuple(x[name].shape) if name in x else "not there" for x in (weights, own))
        if there != here:
            raise CheckpointError(
                f"the weights in '{path}' are not those of this model: '{name}' is {there}, here it is {here}"
            )


def _existing_config(run: Path) -> Path:
    if not (run / CONFIG).is_file():
        raise CheckpointError(f"'{run}' is not a run: it has no {CONFIG}; 'brt train --out {run}' makes one")
    return run / CONFIG

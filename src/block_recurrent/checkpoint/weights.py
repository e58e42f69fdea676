"""The weights of a run: `load_run`, and export to one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from block_recurrent import models
from block_recurrent.accounting import check_weights_fit
from block_recurrent.checkpoint.folders import Checkpoint, find_checkpoint, verify
from block_recurrent.checkpoint.sharded import read_sharded_weights
from block_recurrent.data.tokenizers.base import tokenizer_of_run
from block_recurrent.errors import CheckpointError, FileFormatError, NotFoundError, did_you_mean
from block_recurrent.io.atomic import atomic_file
from block_recurrent.io.tensors import check_finite, read_tensors, write_tensors
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.models import CONFIG
from block_recurrent.run_config import RunConfig, read_toml

if TYPE_CHECKING:
    from block_recurrent.data import Tokenizer

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class LoadedRun:
    """A loaded run, for evaluation and generation."""

    model: BlockRecurrentLM
    """In eval mode."""
    config: RunConfig
    """The configuration that it was trained with."""
    tokenizer: Tokenizer
    """The tokenizer of its data."""
    checkpoint: Checkpoint
    """The checkpoint that was loaded: its folder, step and validation result."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as a damaged checkpoint that was skipped."""


def load_run(run: str | Path, checkpoint: str | Path = "last", device: torch.device | str = "cpu") -> LoadedRun:
    """Load the model of a run in eval mode, with its configuration and tokenizer.

    Args:
        run: a run folder, a checkpoint folder, or the name of a bundled model.
        checkpoint: "last", "best" (on validation), or a checkpoint folder.
        device: the device to load the model to.
    """
    run, checkpoint, told = models.locate(run, checkpoint)
    config = read_config(run)
    check_weights_fit(config.model)
    model = BlockRecurrentLM(config.model)

    def load(path: Path) -> Checkpoint:
        found = verify(path)
        weights = read_weights(path)
        check_fits(weights, model.state_dict(), path)
        model.load_state_dict(weights)
        return found

    found, notes = find_checkpoint(run, checkpoint, verify if checkpoint == "best" else load)
    if found is None:
        raise CheckpointError(f"'{run}' has no checkpoint yet: train it further with 'brt train'")
    if checkpoint == "best":  # known only after reading all of them
        load(found.path)
    return LoadedRun(model.to(device).eval(), config, read_tokenizer(run, config), found, (*told, *notes))


def read_config(run: Path) -> RunConfig:
    """The configuration of a run; an edited file is an error."""
    if not (run / CONFIG).is_file():
        hint = did_you_mean(str(run), models.names())
        raise NotFoundError(f"'{run}' is not a run: it has no {CONFIG}{hint}; 'brt train --out {run}' creates one")
    values = read_toml(run / CONFIG, sealed=True)
    if not values.get("model"):
        raise CheckpointError(f"'{run}' is not a run: its {CONFIG} has no section 'model'")
    return RunConfig.from_dict(values)


def read_tokenizer(run: Path, config: RunConfig) -> Tokenizer:
    """The tokenizer of a run, if it is the one that the configuration names."""
    return tokenizer_of_run(run, config.data.tokenizer)


def export(run: str | Path, out: Path, checkpoint: str | Path = "last") -> LoadedRun:
    """Write the weights of a run as one safetensors file, with the model's configuration in its metadata."""
    loaded = load_run(run, checkpoint)
    header = {"config": json.dumps(loaded.config.model.to_dict()), "step": str(loaded.checkpoint.step)}
    with atomic_file(out) as aside:
        write_tensors(aside, loaded.model.state_dict(), header)
    return loaded


def read_weights(path: Path) -> dict[str, Tensor]:
    """The full weights of a checkpoint folder, verified to be finite, on the CPU."""
    try:
        weights = read_tensors(path / WEIGHTS)[0] if (path / WEIGHTS).is_file() else read_sharded_weights(path)
        check_finite(weights)
    except FileFormatError as error:
        raise CheckpointError(f"the weights in '{path}' can't be used: {error}") from None
    return weights


def check_fits(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    """Raise an error that names a weight, unless the weights of a checkpoint match the model."""
    for name in sorted(own.keys() | weights.keys()):
        there, here = (tuple(x[name].shape) if name in x else "missing" for x in (weights, own))
        if there != here:
            raise CheckpointError(
                f"'{path}' does not match the model: its '{name}' is {there}, but the model has {here}"
            )

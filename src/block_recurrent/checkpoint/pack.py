"""Packing a run as a bundled model: one small folder that every command loads by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from block_recurrent.checkpoint.folders import write_manifest
from block_recurrent.checkpoint.weights import WEIGHTS, LoadedRun
from block_recurrent.errors import CheckpointError
from block_recurrent.io.atomic import atomic_folder
from block_recurrent.io.door import MANIFEST, seal_json
from block_recurrent.io.tensors import write_tensors
from block_recurrent.models import CARD, CONFIG, TOKENIZER
from block_recurrent.models.card import FORMAT, VERSION, card_text

README = "README.md"
OUR_FILES = {WEIGHTS, CONFIG, TOKENIZER, CARD, README, MANIFEST}


def pack(loaded: LoadedRun, card: dict[str, Any], out: Path, most_bytes: int) -> int:
    """Write the folder atomically, replacing an existing model. Returns its size in bytes.

    Matrices become bfloat16. Vectors (norms, gates, scales) are small and decide how long a state lasts: they don't.
    """
    weights = {
        name: x.to(torch.bfloat16) if x.ndim >= 2 else x.float() for name, x in loaded.model.state_dict().items()
    }
    # Remove local paths.
    config = loaded.config.replace("data", path="").replace("train", init_from="", device="auto")
    try:
        with atomic_folder(out, _check_free) as aside:
            write_tensors(aside / WEIGHTS, weights, {"step": str(loaded.checkpoint.step)})
            (aside / CONFIG).write_text(config.to_toml(), encoding="utf-8")
            if loaded.tokenizer.model is not None:
                (aside / TOKENIZER).write_bytes(loaded.tokenizer.model)
            sealed = seal_json(json.dumps({"format": FORMAT, "version": VERSION, **card}, indent=1, ensure_ascii=False))
            (aside / CARD).write_text(sealed, encoding="utf-8")
            (aside / README).write_bytes(card_text(card).encode(errors="backslashreplace"))
            size = sum(path.stat().st_size for path in aside.iterdir())
            if size > most_bytes:
                raise CheckpointError(
                    f"the model has {size / 1e6:.1f} MB, the limit is {most_bytes / 1e6:g}: train a smaller one, or "
                    "allow more with --most-mb"
                )
            write_manifest(aside, loaded.checkpoint.step, loaded.checkpoint.validation_bits)
    except OSError as error:
        raise CheckpointError(f"'{out}' can't be written: {error.strerror or error}") from None
    return size


def _check_free(out: Path) -> None:
    """Raise an error if the folder contains anything but a packed model."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if out.exists() and (CARD not in names or names - OUR_FILES):
        raise CheckpointError(f"'{out}' exists and is not only a packed model: choose another --out")

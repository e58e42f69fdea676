"""A model as a run's folder, so that every command can read what a study has trained."""

from __future__ import annotations

import shutil
from pathlib import Path

from block_recurrent.checkpoint import CONFIG, TOKENIZER, WEIGHTS, aside_of, finish, step_folder, write_tensors
from block_recurrent.data import Tokenizer
from block_recurrent.errors import CheckpointError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.run_config import RunConfig


def save_run(run: Path, config: RunConfig, model: BlockRecurrentLM, tokenizer: Tokenizer, step: int) -> Path:
    """Write configuration, tokenizer and one checkpoint that holds the weights alone. Returns the checkpoint."""
    path = step_folder(run, step)
    aside = aside_of(path)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        config = config.replace("data", tokenizer=tokenizer.sha256)
        (run / CONFIG).write_text(config.to_toml(), encoding="utf-8")
        if tokenizer.model is not None:
            (run / TOKENIZER).write_bytes(tokenizer.model)
        write_tensors(aside / WEIGHTS, model.state_dict())
        finish(path, step, None)
    except OSError as error:
        raise CheckpointError(f"the run '{run}' can't be written: {error.strerror or error}") from None
    return path

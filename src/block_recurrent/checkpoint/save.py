"""`save_run`: save any trained model as a run folder that every command reads."""

from __future__ import annotations

import json
from pathlib import Path

from block_recurrent.checkpoint.folders import aside_of, finish, list_checkpoints, step_folder
from block_recurrent.checkpoint.weights import WEIGHTS
from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.errors import BlockRecurrentError, CheckpointError, ConfigError
from block_recurrent.io.atomic import remove_folder
from block_recurrent.io.output import write_file
from block_recurrent.io.tensors import write_tensors
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.models import CONFIG, TOKENIZER
from block_recurrent.run_config import RunConfig


def save_run(
    model: BlockRecurrentLM,
    tokenizer: Tokenizer | str,
    run: str | Path,
    *,
    step: int = 0,
    config: RunConfig | None = None,
    overwrite: bool = False,
) -> Path:
    """Save a model and its tokenizer as a run folder; return the checkpoint's folder.

    `load_run`, `brt eval`, `brt write`, `brt serve` and `brt export` read it, and `brt train --init-from` starts from
    its weights. It has no optimizer state, so training can't be resumed from it.

    Args:
        model: the model to save.
        tokenizer: its tokenizer, "bytes", or the path of a SentencePiece file.
        run: the folder to create.
        step: the number of updates so far.
        config: the training configuration to save with it; default: only that of the model.
        overwrite: replace an existing run.
    """
    run, tokenizer = Path(run), load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the model's vocab_size is {model.config.vocab_size}, the tokenizer's is {tokenizer.vocab_size}: they "
            "must be equal"
        )
    config = RunConfig(system="", size="", model=model.config) if config is None else config
    if config.model != model.config:
        raise ConfigError(
            "config.model is not the configuration of the model: omit config, or set config.model to model.config"
        )
    found = list_checkpoints(run)
    if not overwrite and (found or any((run / name).exists() for name in (CONFIG, TOKENIZER))):
        raise CheckpointError(f"'{run}' already contains a run: choose another folder, or pass overwrite=True")
    path = step_folder(run, step)
    aside = aside_of(path)
    try:
        aside.mkdir(parents=True, exist_ok=True)
        header = {"config": json.dumps(model.config.to_dict())}
        write_tensors(aside / WEIGHTS, model.state_dict(), header)
        config = config.replace("data", tokenizer=tokenizer.sha256)
        write_run_files(run, config, tokenizer, CheckpointError)
        finish(path, step, None)
        for old in found:
            if old != path:
                remove_folder(old)
    except OSError as error:
        raise CheckpointError(f"the run '{run}' can't be written: {error.strerror or error}") from None
    return path


def write_run_files(run: Path, config: RunConfig, tokenizer: Tokenizer, error: type[BlockRecurrentError]) -> None:
    """Write the configuration and the tokenizer of a run. error: the class of error if that fails."""
    write_file(run / CONFIG, config.to_toml(), error)
    if tokenizer.model is None:
        (run / TOKENIZER).unlink(missing_ok=True)
    else:
        write_file(run / TOKENIZER, tokenizer.model, error)

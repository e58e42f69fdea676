"""Checkpoint folders, written atomically, hashed, and readable by every command; `load_run` and `save_run`.

A run is a folder:

    config.toml                     the resolved configuration
    tokenizer.model                 the SentencePiece file (none: bytes)
    metrics.jsonl, log.txt          metrics and log
    checkpoints/step-00001000/      manifest.json (step, validation, SHA-256 of every other file and its own),
                                    model.safetensors, and what training needs to resume

A checkpoint is written to a hidden temporary folder, synced and renamed, so that a crash at any moment leaves
either no checkpoint or a complete one. A sharded run has `sharded/` (torch.distributed.checkpoint) instead of
model.safetensors; `brt export` converts it to one file.
"""

from block_recurrent.checkpoint.folders import (
    MANIFEST,
    Checkpoint,
    aside_of,
    find_checkpoint,
    finish,
    list_checkpoints,
    prune,
    read_manifest,
    set_aside,
    step_folder,
    step_of,
    sweep,
    verify,
)
from block_recurrent.checkpoint.save import save_run, write_run_files
from block_recurrent.checkpoint.sharded import SHARDED, WEIGHT_PREFIX, read_sharded
from block_recurrent.checkpoint.state_file import INITIAL_STATE, load_state, save_state
from block_recurrent.checkpoint.weights import (
    WEIGHTS,
    LoadedRun,
    check_fits,
    export,
    load_run,
    read_config,
    read_tokenizer,
    read_weights,
    write_tensors,
)
from block_recurrent.models import CONFIG, TOKENIZER

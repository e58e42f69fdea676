"""Bundled models: trained models that are part of the package, each with a name that works wherever a run does.

A model is a folder next to this file: a checkpoint's `manifest.json` and `model.safetensors` (bfloat16), with the run's
`config.toml` and `tokenizer.model`, and the model card as `card.json` and `README.md`.
`brt models pack` packs a run as one. No torch here.
"""

from __future__ import annotations

import os
from pathlib import Path

from block_recurrent.io.door import MANIFEST

ROOM = Path(__file__).parent
"""The folder of the models of this installation."""
CARD, CONFIG, TOKENIZER = "card.json", "config.toml", "tokenizer.model"


def names() -> list[str]:
    """The bundled models by name."""
    return sorted(path.parent.name for path in ROOM.glob(f"*/{CARD}"))


def in_box(name: str | Path) -> Path | None:
    """The folder of the model of that name; None if there is none.

    A bare word is a name. Anything with a separator, and every `Path`, is a path: `./code` is a local folder.
    """
    return ROOM / name if isinstance(name, str) and name in names() else None


def locate(run: str | Path, checkpoint: str | Path = "last") -> tuple[Path, str | Path, list[str]]:
    """Resolve the name of a run: its folder, the checkpoint, and notes for the user.

    run: a run folder, a checkpoint folder, or the name of a bundled model.
    """
    boxed, notes = in_box(run), []
    folder = Path(run) if boxed is None else boxed
    if boxed is not None and Path(run).exists():
        notes = [f"'{run}' refers to the bundled model; for the folder of that name, use '{os.curdir}{os.sep}{run}'"]
    if not (folder / MANIFEST).is_file():
        return folder, checkpoint, notes
    # A bundled model is a checkpoint that includes its configuration and tokenizer.
    return folder if (folder / CONFIG).is_file() else folder.parent.parent, folder, notes

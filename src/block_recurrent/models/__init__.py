"""Models in the box: trained models that come with the package, each under a name that serves wherever a run does.

A model is a folder beside this file: a checkpoint's `manifest.json` and `model.safetensors` (bfloat16), with the run's
`config.toml` and `tokenizer.model`, and `card.json` and `README.md`, which say what it was made of and what it can do.
`brt models pack` makes one of a run. No torch here.
"""

from __future__ import annotations

import os
from pathlib import Path

from block_recurrent.io.door import MANIFEST

ROOM = Path(__file__).parent
"""Where the models of this installation are."""
CARD, CONFIG, TOKENIZER = "card.json", "config.toml", "tokenizer.model"


def names() -> list[str]:
    """What is in the box, by name."""
    return sorted(path.parent.name for path in ROOM.glob(f"*/{CARD}"))


def in_box(name: str | Path) -> Path | None:
    """The folder of the model of that name; None where there is none.

    A bare word is a name. Whatever has a separator in it, and every `Path`, is a path: `./code` is a folder of yours.
    """
    return ROOM / name if isinstance(name, str) and name in names() else None


def locate(run: str | Path, checkpoint: str | Path = "last") -> tuple[Path, str | Path, list[str]]:
    """Where a run is, which checkpoint of it is meant, and what to tell the user. Every way to name a run ends here.

    run: a run's folder, one of its checkpoint folders, or the name of a model in the box.
    """
    boxed, notes = in_box(run), []
    folder = Path(run) if boxed is None else boxed
    if boxed is not None and Path(run).exists():
        notes = [f"'{run}' is the model in the box; your folder of that name is '{os.curdir}{os.sep}{run}'"]
    if not (folder / MANIFEST).is_file():
        return folder, checkpoint, notes
    # A model in the box is a checkpoint that has its configuration and tokenizer with it.
    return folder if (folder / CONFIG).is_file() else folder.parent.parent, folder, notes

"""The manifest of an exported folder: every file with its hash, checked when the folder is loaded from disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from block_recurrent.errors import FileFormatError
from block_recurrent.io import door

FORMAT = "block-recurrent export"
VERSION = 2
NAME = "block_recurrent_manifest.json"
README = "README.md"
"""The model card, which its author completes: nothing is loaded from it, and a changed one is only reported."""


def write_export_manifest(folder: Path) -> None:
    """Write the manifest of a folder being exported, and make its files readable by all."""
    for path in folder.iterdir():
        path.chmod(0o644)
    manifest = {"format": FORMAT, "version": VERSION, "files": dict(sorted(door.list_files(folder).items()))}
    (folder / NAME).write_text(door.seal_json(json.dumps(manifest, indent=1)))


def check_export(name: Any) -> None:
    """Raise an error if a file of an exported folder was changed or added; a changed card is a warning.

    Folders of 0.1.0 have no manifest.

    transformers loads more than its own files where it finds them: adapters, pickled weights, templates.
    """
    folder = Path(str(name))
    if not (folder / NAME).is_file():
        return
    try:
        files = door.read_manifest(folder / NAME, FORMAT, {VERSION: {"files": door.is_files}})["files"]
        for listed, digest in files.items():
            if (folder / listed).is_file() and door.sha256_of(folder / listed) == digest:
                continue
            if listed != README:
                raise FileFormatError(f"{listed} is missing, or its hash differs")
            warnings.warn(f"the card of the export '{name}', {README}, was changed after the export", stacklevel=3)
        if added := sorted(_visible_files(folder) - files.keys() - {NAME, README}):
            raise FileFormatError(f"{NAME} does not list {added[0]}")
    except FileFormatError as error:
        raise FileFormatError(
            f"the export '{name}' is damaged: {error}; export it again, or remove {NAME} if you changed it yourself"
        ) from None


def _visible_files(folder: Path) -> set[str]:
    """Hidden ones (.git, .cache) are those of tools that keep folders."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)}

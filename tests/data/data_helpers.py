"""What several data tests look at."""

from __future__ import annotations

import json

from block_recurrent.data import Corpus


def left_out(corpus: Corpus) -> dict[str, str]:
    """Names and reasons."""
    return {left["name"]: left["reason"] for left in corpus.left_out}


def names(corpus: Corpus) -> list[str]:
    """The names of all documents, as the manifest on disk lists them."""
    manifest = json.loads((corpus.folder / "manifest.json").read_text(encoding="utf-8"))
    return [document["name"] for document in manifest["documents"]]

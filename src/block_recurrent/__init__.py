"""Block-Recurrent Transformers: language models that read whole books, with a memory of fixed size.

The names below are imported lazily, when first used, so that `import block_recurrent` does not load torch.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

TYPE_CHECKING = False  # as in typing, whose import takes long: until `brt` has begun, Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "BlockRecurrentLM": "model.language_model",
    "DocumentMemory": "model.memory",
    "Engine": "inference.engine",
    "ModelConfig": "config",
    "Session": "inference.session",
    "from_meliad": "model.meliad",
    "keep_freed_memory": "allocator",
    "load_run": "checkpoint",
    "preset": "presets",
    "save_run": "checkpoint",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from block_recurrent.allocator import keep_freed_memory as keep_freed_memory
    from block_recurrent.checkpoint import load_run as load_run
    from block_recurrent.checkpoint import save_run as save_run
    from block_recurrent.config import ModelConfig as ModelConfig
    from block_recurrent.inference.engine import Engine as Engine
    from block_recurrent.inference.session import Session as Session
    from block_recurrent.model.language_model import BlockRecurrentLM as BlockRecurrentLM
    from block_recurrent.model.meliad import from_meliad as from_meliad
    from block_recurrent.model.memory import DocumentMemory as DocumentMemory
    from block_recurrent.presets import preset as preset


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'block_recurrent' has no attribute '{name}'")
    return getattr(importlib.import_module(f"block_recurrent.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if "transformers" in sys.modules:
    from block_recurrent import hub

    with suppress(hub.MissingExtraError):  # an unsupported version of transformers: `hub.register()` reports it
        hub.register()

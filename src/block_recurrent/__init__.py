"""Block-Recurrent Transformers: language models that read whole books, with a memory of fixed size.

The names below are imported from their rooms when first used, so that `import block_recurrent` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from block_recurrent.hub.registration import register_with_transformers

__version__ = "0.1.0"

_HOMES = {
    "BlockRecurrentLM": "model.language_model",
    "DocumentMemory": "model.memory",
    "Engine": "inference.engine",
    "ModelConfig": "config",
    "Session": "inference.session",
    "from_meliad": "model.meliad",
    "keep_freed_memory": "allocator",
    "preset": "presets",
}

__all__ = [
    "BlockRecurrentLM",
    "DocumentMemory",
    "Engine",
    "ModelConfig",
    "Session",
    "__version__",
    "from_meliad",
    "keep_freed_memory",
    "preset",
]

if TYPE_CHECKING:
    from block_recurrent.allocator import keep_freed_memory
    from block_recurrent.config import ModelConfig
    from block_recurrent.inference.engine import Engine
    from block_recurrent.inference.session import Session
    from block_recurrent.model.language_model import BlockRecurrentLM
    from block_recurrent.model.meliad import from_meliad
    from block_recurrent.model.memory import DocumentMemory
    from block_recurrent.presets import preset


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'block_recurrent' has no attribute '{name}'")
    return getattr(importlib.import_module(f"block_recurrent.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_transformers()

"""Telling transformers about our classes, without importing it.

`AutoModelForCausalLM.from_pretrained(folder)` finds a class by the model type in config.json, if somebody has
registered it. So that `import block_recurrent` is enough, in any order with `import transformers`, and stays light: we
wait until the module that holds the register is imported, and register then.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

REGISTER = "transformers.models.auto.modeling_auto"


def register_with_transformers() -> None:
    """Make the Auto classes know ours; now if transformers is there, else as soon as it is."""
    if REGISTER in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    try:
        _register_classes()
    except ImportError:
        # A transformers without what we need: not a reason for its import to fail. `brt export` says what is missing.
        return


def _register_classes() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from block_recurrent.hub.configuration import BlockRecurrentConfig
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
    from block_recurrent.hub.tokenization import BlockRecurrentTokenizer

    AutoConfig.register(BlockRecurrentConfig.model_type, BlockRecurrentConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockRecurrentConfig, BlockRecurrentForCausalLM, exist_ok=True)
    AutoTokenizer.register(BlockRecurrentConfig, slow_tokenizer_class=BlockRecurrentTokenizer, exist_ok=True)


class _Waiting(importlib.abc.MetaPathFinder):
    """Stands first in the line of finders until the register's module is looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != REGISTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Loads as the real loader does, and registers our classes afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

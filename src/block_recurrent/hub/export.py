"""`brt export`: a folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import json
from pathlib import Path

from block_recurrent.checkpoint import LoadedRun, load_run
from block_recurrent.errors import CheckpointError, ConfigError, MissingExtraError
from block_recurrent.hub.manifest import README, write_export_manifest
from block_recurrent.io.atomic import atomic_folder

STUB = "block_recurrent_hf.py"
# The code for `trust_remote_code=True`. It only refers to the installed version of this package.
STUB_CODE = '''"""This model's code is the Python package block-recurrent; this file only points to it."""

try:
    from block_recurrent.hub.configuration import BlockRecurrentConfig
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
    from block_recurrent.hub.tokenization import BlockRecurrentTokenizer
except ImportError as error:
    raise ImportError(
        "this model needs the package block-recurrent, which is not installed (or too old): "
        "pip install 'block-recurrent[hf]'"
    ) from error

__all__ = ["BlockRecurrentConfig", "BlockRecurrentForCausalLM", "BlockRecurrentTokenizer"]
'''

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- block-recurrent
---

# {system} {size}

A Block-Recurrent Transformer ({system}, {size}) after {step:,} steps of training: {parameters:,} parameters, vocabulary
{vocabulary:,}, window {window}, segment {segment}. Its author should add here what it was trained on, how it was
evaluated, and its license.

```python
import block_recurrent.hub  # pip install 'block-recurrent[hf]'
from transformers import AutoModelForCausalLM, AutoTokenizer

block_recurrent.hub.register()
model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""


def export_folder(run: str | Path, out: Path, checkpoint: str = "last") -> LoadedRun:
    """Write model, tokenizer and the stub, atomically."""
    try:
        from block_recurrent.hub.modeling import BlockRecurrentForCausalLM
    except ImportError:
        raise MissingExtraError("brt export to a Hugging Face folder", "hf") from None
    _check_free(out)
    loaded = load_run(run, checkpoint)
    try:
        with atomic_folder(out, _check_free) as folder:
            _write(loaded, folder, BlockRecurrentForCausalLM)
    except OSError as error:
        raise CheckpointError(f"'{out}' can't be written: {error.strerror or error}") from None
    return loaded


def _check_free(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"'{out}' exists: choose another folder, or remove it")


def _write(loaded: LoadedRun, folder: Path, model_class: type) -> None:
    from safetensors import SafetensorError

    from block_recurrent.hub.configuration import BlockRecurrentConfig
    from block_recurrent.hub.tokenization import VOCABULARY, BlockRecurrentTokenizer

    module = STUB.removesuffix(".py")
    config = BlockRecurrentConfig(**loaded.model.config.to_dict())
    config.auto_map = {
        "AutoConfig": f"{module}.BlockRecurrentConfig",
        "AutoModelForCausalLM": f"{module}.BlockRecurrentForCausalLM",
    }
    model = model_class(config)
    model.model.load_state_dict(loaded.model.state_dict())
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    vocabulary = None
    if loaded.tokenizer.model is not None:
        vocabulary = folder / VOCABULARY
        vocabulary.write_bytes(loaded.tokenizer.model)
    kind = "bytes" if vocabulary is None else "sentencepiece"
    tokenizer = BlockRecurrentTokenizer(str(vocabulary) if vocabulary else None, kind=kind)
    tokenizer.save_pretrained(folder)
    _add_auto_map(folder / "tokenizer_config.json", {"AutoTokenizer": [f"{module}.BlockRecurrentTokenizer", None]})
    (folder / STUB).write_text(STUB_CODE, encoding="utf-8")
    (folder / README).write_text(_card(loaded), encoding="utf-8")
    write_export_manifest(folder)


def _card(loaded: LoadedRun) -> str:
    config = loaded.model.config
    return CARD.format(
        system=loaded.config.system or "model",
        size=loaded.config.size,
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        vocabulary=config.vocab_size,
        window=config.window,
        segment=config.segment,
        step=loaded.checkpoint.step,
    )


def _add_auto_map(path: Path, auto_map: dict[str, list[str | None]]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"auto_map": auto_map}, indent=2) + "\n", encoding="utf-8")

"""Memory files: one safetensors file with a header that says whose memory it is. No pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.errors import BlockRecurrentError, FileFormatError
from block_recurrent.io.atomic import atomic_file
from block_recurrent.model.knn_memory import KNNMemory, room_to_spare
from block_recurrent.model.memory import DocumentMemory, LayerMemory

FORMAT = "block-recurrent-memory"
VERSION = 1
HEADER_STEP = 1 << 13
"""The header is filled up to a multiple of this, so that a file is as large after a million tokens as after one."""


def save_memory(memory: DocumentMemory, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Write the file aside, then rename it: an interrupted save leaves the old file as it was.

    extra: further plain values for the header, given back by `load_memory_with_extra`.
    """
    tensors = {
        f"layers.{i}.{name}": x.detach().cpu().contiguous()
        for i, layer in enumerate(memory.layers)
        for name, x in layer.named_tensors().items()
    }
    header = {
        "version": VERSION,
        "config": memory.config.to_dict(),
        "fingerprint": memory.maker_fingerprint(),
        "tokens_read": memory.tokens_read.tolist(),
        "recall_counts": {str(i): layer.knn.counts for i, layer in enumerate(memory.layers) if layer.knn},
        "recall_ends": {str(i): layer.knn.ends for i, layer in enumerate(memory.layers) if layer.knn},
        "extra": extra or {},
    }
    text = json.dumps(header)
    metadata = {FORMAT: text.ljust(-(-len(text) // HEADER_STEP) * HEADER_STEP)}
    metadata["sha256"] = _hash(metadata[FORMAT], tensors)
    try:
        with atomic_file(path) as aside:
            aside.write_bytes(save(tensors, metadata=metadata))
    except OSError as error:
        raise FileFormatError(f"the memory can't be written to '{path}': {error.strerror or error}") from None


def load_memory(path: Path) -> DocumentMemory:
    """Read and check a memory file; anything wrong with it is a FileFormatError that says what."""
    return load_memory_with_extra(path)[0]


def load_memory_with_extra(path: Path) -> tuple[DocumentMemory, dict[str, Any]]:
    """As `load_memory`, with the further values that were saved in the header."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = _header(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileFormatError(f"there is no memory file '{path}'") from None
    except (SafetensorError, OSError) as error:
        raise FileFormatError(
            f"'{path}' can't be read as a memory file, it is damaged, cut or another kind of file: {error}"
        ) from None
    if _hash(metadata[FORMAT], tensors) != metadata.get("sha256"):
        raise FileFormatError(
            f"memory file '{path}' is damaged: its contents don't match their hash; read the text again"
        )
    try:
        config = ModelConfig.from_dict(header["config"])
        layers = [_layer(tensors, i, header, config) for i in range(config.num_layers)]
        tokens_read = torch.tensor(header["tokens_read"], dtype=torch.int64)
        extra = dict(header.get("extra", {}))
    except (KeyError, TypeError, BlockRecurrentError) as error:
        raise FileFormatError(f"memory file '{path}' is damaged: {error}") from None
    return DocumentMemory(tuple(layers), tokens_read, config, fingerprint=header["fingerprint"]), extra


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _hash(header: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256((header + hash_tensors(tensors)).encode()).hexdigest()


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if FORMAT not in metadata:
        raise FileFormatError(f"'{path}' is a safetensors file, but not a memory file: it has no '{FORMAT}' header")
    try:
        header = json.loads(metadata[FORMAT])
    except json.JSONDecodeError as error:
        raise FileFormatError(f"memory file '{path}' is damaged: its header is not JSON: {error}") from None
    if not isinstance(header, dict) or "version" not in header:
        raise FileFormatError(f"memory file '{path}' is damaged: its header has no version")
    if header["version"] != VERSION:
        raise FileFormatError(
            f"memory file '{path}' has format version {header['version']}, this program reads version {VERSION}"
        )
    return header


def _layer(tensors: dict[str, Tensor], index: int, header: dict[str, Any], config: ModelConfig) -> LayerMemory:
    def tensor(name: str) -> Tensor:
        return tensors[f"layers.{index}.{name}"]

    counts, ends = (header[name].get(str(index)) for name in ("recall_counts", "recall_ends"))
    knn = None
    if counts is not None:
        entries = tensor("recall_keys"), tensor("recall_values")
        knn = KNNMemory.from_tensors(*entries, counts, room_to_spare(config), ends)
    state = tensor("state") if index + 1 in config.recurrent_layers else None
    return LayerMemory(tensor("keys"), tensor("values"), state, knn)

"""Memory files: one safetensors file with a header that identifies the model. No pickle."""

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
from block_recurrent.errors import BlockRecurrentError, FileFormatError, NotFoundError
from block_recurrent.io import door
from block_recurrent.io.atomic import atomic_file
from block_recurrent.io.tensors import check_finite, read_tensors
from block_recurrent.model.knn_memory import KNNMemory, room_to_spare
from block_recurrent.model.memory import DocumentMemory, LayerMemory

FORMAT = "block-recurrent-memory"
VERSION = 1
HEADER_STEP = 1 << 13
"""The header is padded to a multiple of this, so that a file has the same size after a million tokens as after one."""
ROOM_LIMIT = 1 << 30
"""Maximum bytes of spare room that a file may require, regardless of its size."""
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_RULES: dict[str, door.Rule] = {
    "version": door.is_count,
    "config": lambda values: isinstance(values, dict),
    "fingerprint": lambda value: value is None or isinstance(value, str),
    "tokens_read": lambda values: door.is_counts(values) and len(values) > 0,
    "recall_counts": lambda values: isinstance(values, dict),
    "recall_ends": lambda values: isinstance(values, dict),
    "extra": lambda values: isinstance(values, dict),
}


def save_memory(memory: DocumentMemory, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Write to a temporary file, then rename it: an interrupted save does not change the old file.

    extra: additional plain values for the header, returned by `load_memory_with_extra`.
    """
    named = memory.named_tensors()
    # Caches may have a lower precision than states; a file has one dtype, the widest.
    dtype = max((x.dtype for x in named.values()), key=lambda dtype: dtype.itemsize)
    tensors = {name: x.detach().to("cpu", dtype).contiguous() for name, x in named.items()}
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
        check_finite(tensors)
        with atomic_file(path) as aside:
            aside.write_bytes(save(tensors, metadata=metadata))
    except (FileFormatError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileFormatError(f"the memory can't be written to '{path}': {reason}") from None


def load_memory(path: Path) -> DocumentMemory:
    """Load and verify a memory file; any problem is a FileFormatError."""
    return load_memory_with_extra(path)[0]


def load_header(path: Path) -> dict[str, Any]:
    """The header of a memory file, without reading or verifying its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return _header(path, file.metadata() or {})
    except FileNotFoundError:
        raise NotFoundError(f"memory file '{path}' does not exist") from None
    except (SafetensorError, OSError) as error:
        raise FileFormatError(f"'{path}' can't be read as a memory file: {error}") from None


def load_memory_with_extra(path: Path) -> tuple[DocumentMemory, dict[str, Any]]:
    """Like `load_memory`, with the additional values of the header."""
    tensors, metadata = read_tensors(path, "memory file")
    header = _header(path, metadata)
    if _hash(metadata[FORMAT], tensors) != metadata.get("sha256"):
        raise FileFormatError(
            f"memory file '{path}' is damaged: its contents don't match their hash; read the text again"
        )
    try:
        config = _check(header, tensors)
        layers = [_layer(tensors, i, header, config) for i in range(config.num_layers)]
    except (BlockRecurrentError, RuntimeError, OverflowError, TypeError) as error:
        raise FileFormatError(f"memory file '{path}' is damaged: {door.first_line(error)}") from None
    tokens_read = torch.tensor(header["tokens_read"], dtype=torch.int64)
    return DocumentMemory(tuple(layers), tokens_read, config, fingerprint=header["fingerprint"]), header["extra"]


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
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"memory file '{path}' is damaged: its header is not JSON: {error}") from None
    if not isinstance(header, dict) or "version" not in header:
        raise FileFormatError(f"memory file '{path}' is damaged: its header has no version")
    if header["version"] != VERSION:
        raise FileFormatError(
            f"memory file '{path}' has format version {header['version']}; this version supports {VERSION}"
        )
    return header


def _check(header: dict[str, Any], tensors: dict[str, Tensor]) -> ModelConfig:
    """The configuration, if everything else has the names, shapes, types and ranges that follow from it.

    The kernels compute addresses from these numbers.
    """
    door.check_schema(header, _RULES, "its header")
    config, lanes = ModelConfig.from_dict(header["config"]), len(header["tokens_read"])
    if config.num_layers > len(tensors):  # before anything is allocated per layer
        raise FileFormatError(f"it has {len(tensors)} tensors for {config.num_layers} layers")
    expected = DocumentMemory.empty(config, lanes, "meta", torch.float32).named_tensors()
    for name in sorted(tensors.keys() | expected.keys()):
        found, rule = (tuple(x[name].shape) if name in x else "missing" for x in (tensors, expected))
        if found != rule:
            raise FileFormatError(f"'{name}' is {found}, but should be {rule} by its configuration")
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES:
        raise FileFormatError(f"its tensors are {', '.join(sorted(map(str, dtypes)))}, but should be one float type")
    check_finite(tensors)
    if header["fingerprint"] is None and any(header["tokens_read"]):
        raise FileFormatError("it does not identify the model that made it")
    _check_recall(header, config, lanes)
    room = 2 * len(config.memory_layers) * lanes * room_to_spare(config) * config.num_heads * config.head_dim * 4
    if room > max(ROOM_LIMIT, 64 * sum(x.nbytes for x in tensors.values())):
        raise FileFormatError(f"segment {config.segment} would need {room / 2**30:,.0f} GiB of spare room")
    return config


def _check_recall(header: dict[str, Any], config: ModelConfig, lanes: int) -> None:
    """The number of entries of each kNN memory, and where they end."""
    keys = [str(number - 1) for number in config.memory_layers]
    per_lane = dict.fromkeys(keys, lambda values: door.is_counts(values) and len(values) == lanes)
    door.check_schema(header["recall_counts"], per_lane, "recall_counts")
    door.check_schema(header["recall_ends"], per_lane, "recall_ends")
    for key in keys:
        for count, end in zip(header["recall_counts"][key], header["recall_ends"][key], strict=True):
            if count > min(config.memory_size, end):
                raise FileFormatError(f"it has {count} entries up to {end} in a memory of {config.memory_size}")


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

"""Sharded checkpoints of torch.distributed.checkpoint, whose index is a pickle: read without executing its code.

Only the few classes that an index of tensors needs are allowed. An index with anything else is rejected, and so
is one with objects that are not tensors, which torch would unpickle without restrictions.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from block_recurrent.errors import FileFormatError
from block_recurrent.io.door import first_line

SHARDED = "sharded"
WEIGHT_PREFIX = "model/"
"""Prefix of the weights' names in a sharded checkpoint, which contains other tensors too."""
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("pathlib._local", "pathlib"), name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed in an index of tensors")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = Path(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            entries = list(metadata.storage_data.values())
            outside = any(Path(e.relative_path).name != e.relative_path or e.transform_descriptors for e in entries)
            if not isinstance(metadata, dcp.Metadata) or outside:
                raise pickle.UnpicklingError("it does not match the files in its folder")
            metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a pickle can raise whatever the classes in it raise
            raise FileFormatError(f"the index '{path}' can't be read: {first_line(error)}") from None
        return metadata


def read_sharded_weights(path: Path) -> dict[str, Tensor]:
    """The full weights of a sharded checkpoint, on the CPU."""
    known = _Reader(path / SHARDED).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(WEIGHT_PREFIX) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    read_sharded(wanted, path)
    return {name.removeprefix(WEIGHT_PREFIX): x for name, x in wanted.items()}


def read_sharded(tensors: dict[str, Any], path: Path) -> None:
    """Load tensors, sharded or not, from those of the same names in a sharded checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected in a single process
        alone = not torch.distributed.is_initialized()
        dcp.load(tensors, storage_reader=_Reader(path / SHARDED), no_dist=alone)

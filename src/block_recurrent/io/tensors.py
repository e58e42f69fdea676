"""Files of tensors: safetensors, never pickle; non-finite values are not written, and errors are one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from block_recurrent.errors import FileFormatError, NotFoundError
from block_recurrent.io.door import first_line, is_utf8

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Values that are not finite are a FileFormatError; a full disk is an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    check_finite(plain)
    try:
        save_file(plain, path, metadata)
        path.chmod(0o644)  # safetensors creates files that only their owner can read
    except SafetensorError as error:
        raise OSError(str(error)) from None


def read_tensors(path: Path, what: str = "file of tensors") -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # reading a pipe would block
        if not path.exists():
            raise NotFoundError(f"{what} '{path}' does not exist")
        raise FileFormatError(f"'{path}' can't be read as a {what}: it is not a regular file")
    if not is_utf8(path):
        raise FileFormatError(f"'{path}' can't be read as a {what}: its name is not UTF-8: rename it")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FileFormatError(
            f"'{path}' can't be read as a {what}: it is damaged, truncated or another kind of file: {first_line(error)}"
        ) from None
    if not _header_ends_well(path):
        raise FileFormatError(f"'{path}' can't be read as a {what}: it is damaged: its header was changed")
    return tensors, metadata


def _header_ends_well(path: Path) -> bool:
    """The header is filled up with spaces; safetensors would take other white space, and no hash of ours covers it."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(size).rstrip(b" ").endswith(b"}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise an error that names the first tensor with a value that is not finite."""
    for name, x in tensors.items():
        if (x.is_floating_point() or x.is_complex()) and not x.isfinite().all():
            raise FileFormatError(f"'{name}' has values that are not finite")

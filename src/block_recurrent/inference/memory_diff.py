"""The distance between two memories, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from block_recurrent.errors import MemoryMismatchError
from block_recurrent.inference.session_file import SHORT, MemoryFile


@dataclass(frozen=True)
class Distance:
    """The difference of two tensors of one layer."""

    layer: int  # counted from 1
    what: str  # keys, values, state, recall_keys or recall_values
    largest: float  # largest difference of two values
    relative: float  # norm of the difference over the mean norm of the two; 0 if both are zero
    cosine: float  # mean cosine similarity of their vectors; 1 where both are zero


def difference(a: MemoryFile, b: MemoryFile) -> list[Distance]:
    """Compare every tensor of two memories, which must belong to models of the same shape."""
    if a.model_hash != b.model_hash:
        raise MemoryMismatchError(
            f"'{a.path}' belongs to model '{a.model_name}' (weights {a.model_hash[:SHORT]}), '{b.path}' to "
            f"'{b.model_name}' (weights {b.model_hash[:SHORT]}): memories of different models can't be compared"
        )
    rows = []
    for number, (mine, theirs) in enumerate(zip(a.state.memory.layers, b.state.memory.layers, strict=True), start=1):
        others = theirs.named_tensors()
        rows += [_distance(number, what, x, others[what]) for what, x in mine.named_tensors().items()]
    return rows


def _distance(layer: int, what: str, a: Tensor, b: Tensor) -> Distance:
    a, b = a.double().flatten(0, -2), b.double().flatten(0, -2)
    gap = a - b
    mean_length = ((a.norm() + b.norm()) / 2).item()
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    both_zero = (a.norm(dim=-1) == 0) & (b.norm(dim=-1) == 0)
    cosines = torch.where(both_zero, 1.0, (a * b).sum(-1) / lengths.clamp_min(1e-30))
    relative = gap.norm().item() / mean_length if mean_length else 0.0
    return Distance(layer, what, gap.abs().max().item(), relative, cosines.mean().item())

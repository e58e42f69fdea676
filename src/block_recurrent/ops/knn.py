"""Attention over the nearest entries of a large memory, found by exact search."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.knn import cpp_knn_attend

SCORES_AT_ONCE = 2**24
"""Number of scores of a search in memory at once: 64 MiB in float32, regardless of the memory's size."""


def knn_attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, neighbors: int) -> Tensor:
    """Each query (B, H, w, K) over the `neighbors` entries with the largest dot product: (B, H, w, K).

    keys and values (B, H, M, K), visible (B, M): which of them count. They get no gradients. If there are fewer than
    `neighbors`, the others are zero keys with zero values.
    """
    if registry.select("knn", q, queries=q.shape[2]) == "cpp":
        return cpp_knn_attend(q, keys, values, visible, neighbors)
    keys, values = search(q, keys, values, visible, neighbors)
    weights = torch.einsum("bhqk,bhqnk->bhqn", q, keys).softmax(-1)
    return torch.einsum("bhqn,bhqnk->bhqk", weights, values)


@torch.no_grad()
def search(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """For each query the nearest entries, exactly: their keys and values (B, H, w, n, K), in no order."""
    scores, slots = _nearest(q, keys, visible, neighbors)
    found = (scores > float("-inf"))[..., None]
    return _take(keys, slots) * found, _take(values, slots) * found


def _nearest(q: Tensor, keys: Tensor, visible: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each query, and whose they are, (B, H, w, n) each: a chunk of keys at a time."""
    B, H, w, _ = q.shape
    chunk = max(neighbors, SCORES_AT_ONCE // max(1, B * H * w))
    best_scores = q.new_empty(B, H, w, 0)
    best_slots = torch.empty(B, H, w, 0, dtype=torch.int64, device=q.device)
    for first in range(0, keys.shape[2], chunk):
        scores = q @ keys[:, :, first : first + chunk].transpose(-1, -2)
        scores.masked_fill_(~visible[:, None, None, first : first + chunk], float("-inf"))
        top = scores.topk(min(neighbors, scores.shape[-1]), sorted=False)
        best_scores = torch.cat([best_scores, top.values], dim=-1)
        best_slots = torch.cat([best_slots, top.indices + first], dim=-1)
        if best_scores.shape[-1] > neighbors:
            kept = best_scores.topk(neighbors, sorted=False)
            best_scores, best_slots = kept.values, best_slots.gather(-1, kept.indices)
    return best_scores, best_slots


def _take(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, H, M, K) at slots (B, H, w, n) -> (B, H, w, n, K)."""
    B, H, M, K = x.shape
    base = torch.arange(B * H, device=x.device).view(B, H, 1, 1) * M
    return F.embedding(slots + base, x.reshape(B * H * M, K))

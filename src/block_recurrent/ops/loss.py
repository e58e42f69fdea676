"""Cross-entropy straight from the hidden vectors, a few tokens at a time.

The logits of a segment (N x V) are the largest thing in training. Here they exist for one chunk of tokens at a time,
and their gradient is worked out while they are there, so that nothing of size N x V is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.loss import cpp_cross_entropy
from block_recurrent.ops.norm import at_least_float32

# Logits held at once: at most 128 MiB in float32, and not so few that the calls themselves cost time.
MOST_LOGITS, FEWEST_LOGITS = 2**25, 2**20
FEWEST_TOKENS = 512
# Beyond so many nats a probability is no longer a normal float32, and its logarithm is not exact.
EXACT_UP_TO = 80.0


class CrossEntropy(NamedTuple):
    total: Tensor
    """Sum over the tokens that count, in nats; has a gradient."""
    per_token: Tensor
    """(tokens,) in nats; no gradient."""


def cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor) -> CrossEntropy:
    """Negative log-probabilities of `targets` where logits are `hidden @ table.T`.

    hidden (tokens, D); table (V, D); targets (tokens,); counts (tokens,) bool: which tokens are part of the sum.
    """
    chosen = registry.select("cross_entropy", hidden, vocab=table.shape[0], width=table.shape[1])
    if chosen == "cpp" and len(hidden):
        return CrossEntropy(*cpp_cross_entropy(hidden, table, targets, counts))
    if chosen == "chunked":
        return CrossEntropy(*_Chunked.apply(hidden, table, targets, counts))
    logits = at_least_float32(hidden @ table.T)
    per_token = F.cross_entropy(logits, targets, reduction="none")
    return CrossEntropy(per_token.where(counts, 0).sum(), per_token.detach())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        per_token, d_hidden, d_table = _chunk_by_chunk(hidden, table, targets, counts, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(d_hidden, d_table)
        ctx.mark_non_differentiable(per_token)
        return torch.where(counts, per_token, 0).sum(), per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_hidden, d_table = ctx.saved_tensors
        scaled = (None if d is None else d * grads[0].to(d.dtype) for d in (d_hidden, d_table))
        return next(scaled), next(scaled), None, None


def _chunk_by_chunk(
    hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, need_hidden: bool, need_table: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The losses, and the gradients of the sum of those that count, where they are needed."""
    per_token = hidden.new_empty(len(hidden), dtype=at_least_float32(hidden[:0]).dtype)
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_table = torch.zeros_like(table, dtype=per_token.dtype) if need_table else None
    chunk = _tokens_at_once(table)
    for part in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
        d_part = None if d_hidden is None else d_hidden[part]
        per_token[part] = _one_chunk(hidden[part], table, targets[part, None], counts[part, None], d_part, d_table)
    _repair(per_token, hidden, table, targets)
    return per_token, d_hidden, None if d_table is None else d_table.to(table.dtype)


def _one_chunk(
    hidden: Tensor, table: Tensor, target: Tensor, counts: Tensor, d_hidden: Tensor | None, d_table: Tensor | None
) -> Tensor:
    """The losses of some tokens; gradients are written to `d_hidden` and added to `d_table`.

    A function, so that the logits are gone before the next ones are made: they then take the same place in the cache.
    """
    logits = at_least_float32(hidden @ table.T)
    if d_hidden is None and d_table is None:
        return (logits.logsumexp(-1, keepdim=True) - logits.gather(1, target)).squeeze(1)
    # Softmax row by row, in place: the logits pass through memory once.
    probabilities = torch.softmax(logits, -1, out=logits)
    of_target = probabilities.gather(1, target)
    # The gradient of -log p[target] is p - onehot(target); tokens that do not count have none.
    d_logits = probabilities.scatter_(1, target, of_target - 1).to(hidden.dtype)
    if d_hidden is not None:
        torch.mm(d_logits, table, out=d_hidden).mul_(counts)
    if d_table is not None:
        d_table.addmm_(d_logits.T.to(d_table.dtype), (hidden * counts).to(d_table.dtype))
    return -of_target.log().squeeze(1)


def _tokens_at_once(table: Tensor) -> int:
    """As many as a vector is long: the table's gradient, which every chunk adds to, is then no larger than logits.

    Products with fewer than 512 rows are slow, even where their logits would stay in the cache: the table is laid out
    anew for each of them.
    """
    V, D = table.shape
    return max(1, min(max(D, FEWEST_TOKENS, FEWEST_LOGITS // V), MOST_LOGITS // V))


def _repair(per_token: Tensor, hidden: Tensor, table: Tensor, targets: Tensor) -> None:
    """Losses so large that the probability itself was rounded to nothing, from the logits, in place."""
    lost = (per_token > EXACT_UP_TO).nonzero().squeeze(1)
    if len(lost) == 0:
        return
    for part in lost.split(_tokens_at_once(table)):
        logits = at_least_float32(hidden[part] @ table.T)
        per_token[part] = logits.logsumexp(-1) - logits.gather(1, targets[part, None]).squeeze(1)

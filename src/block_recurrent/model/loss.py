"""Cross-entropy straight from the hidden vectors, a few tokens at a time.

The logits of a segment (N x V) are the largest thing in training. Here they exist for one chunk of tokens at a time,
and their gradient is worked out while they are there, so that nothing of size N x V is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from block_recurrent.nn.norm import at_least_float32

# Logits held at once: 64 MiB in float32.
LOGITS_AT_ONCE = 2**24


class CrossEntropy(NamedTuple):
    total: Tensor
    """Sum over the tokens that count, in nats; has a gradient."""
    per_token: Tensor
    """(tokens,) in nats; no gradient."""


def cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor) -> CrossEntropy:
    """Negative log-probabilities of `targets` where logits are `hidden @ table.T`.

    hidden (tokens, D); table (V, D); targets (tokens,); counts (tokens,) bool: which tokens are part of the sum.
    """
    return CrossEntropy(*_CrossEntropy.apply(hidden, table, targets, counts))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        need_hidden, need_table = ctx.needs_input_grad[:2]
        per_token = hidden.new_empty(len(hidden), dtype=at_least_float32(hidden[:0]).dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_table = torch.zeros_like(table, dtype=per_token.dtype) if need_table else None
        chunk = max(1, LOGITS_AT_ONCE // len(table))
        for part in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
            logits = at_least_float32(hidden[part] @ table.T)
            target = targets[part, None]
            log_sum = logits.logsumexp(-1, keepdim=True)
            per_token[part] = (log_sum - logits.gather(1, target)).squeeze(1)
            if d_hidden is None and d_table is None:
                continue
            # The gradient of -log p[target] is p - onehot(target); tokens that do not count have none.
            d_logits = logits.sub_(log_sum).exp_()
            d_logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=logits.dtype))
            d_logits = d_logits.mul_(counts[part, None]).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, table, out=d_hidden[part])
            if d_table is not None:
                d_table.addmm_(d_logits.T.to(d_table.dtype), hidden[part].to(d_table.dtype))
        ctx.save_for_backward(d_hidden, None if d_table is None else d_table.to(table.dtype))
        ctx.mark_non_differentiable(per_token)
        return torch.where(counts, per_token, 0).sum(), per_token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_hidden, d_table = ctx.saved_tensors
        scaled = (None if d is None else d * grads[0].to(d.dtype) for d in (d_hidden, d_table))
        return next(scaled), next(scaled), None, None

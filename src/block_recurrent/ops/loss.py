"""Cross-entropy straight from the hidden vectors, a few tokens at a time.

The logits of a segment (N x V) are the largest thing in training. Here they exist for one chunk of tokens at a time,
and their gradient is computed immediately, so that nothing of size N x V is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.ops import registry
from block_recurrent.ops.cpp.loss import cpp_cross_entropy
from block_recurrent.ops.norm import at_least_float32
from block_recurrent.ops.once import once_differentiable
from block_recurrent.ops.precision import product_dtype

# Number of logits at once: at most 128 MiB in float32, and enough to make the overhead of calls negligible.
MOST_LOGITS, FEWEST_LOGITS = 2**25, 2**20
MOST_LOGITS_ON_GPU = 2**27  # 512 MiB in float32: 4,194 tokens of 32,000 pieces
FEWEST_TOKENS = 512
# Beyond this many nats a probability is no longer a normal float32, and its logarithm is not exact.
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
        # An empty tensor that depends on both: saving them for `once_differentiable` would take memory.
        origin = torch.cat([hidden[:0], table[:0]])
        return CrossEntropy(*_Chunked.apply(hidden, table, targets, counts, origin))
    logits = at_least_float32(hidden @ table.T)
    per_token = F.cross_entropy(logits, targets, reduction="none")
    return CrossEntropy(per_token.where(counts, 0).sum(), per_token.detach())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, origin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = hidden.dtype, table.dtype
        dtype = product_dtype(hidden)
        per_token, d_hidden, d_table = _chunk_by_chunk(
            *(hidden.to(dtype), table.to(dtype), targets[:, None], counts[:, None]), *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(d_hidden, d_table, origin)
        ctx.mark_non_differentiable(per_token)
        return torch.where(counts, per_token, 0).sum(), per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors[:2], ctx.dtypes, strict=True)
        scaled = (None if d is None else d.to(dtype) * grads[0].to(dtype) for d, dtype in saved)
        return *scaled, None, None, None


def _chunk_by_chunk(
    hidden: Tensor, table: Tensor, targets: Tensor, counts: Tensor, need_hidden: bool, need_table: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The losses, and the gradients of the sum of those that count, where they are needed."""
    losses = [at_least_float32(hidden[:0, 0])]
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_table = None
    chunk = _tokens_at_once(table)
    for part in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
        loss, d_logits = _one_chunk(hidden[part] @ table.T, targets[part], need_hidden or need_table)
        losses.append(loss)
        if d_hidden is not None and d_logits is not None:
            torch.mm(d_logits, table, out=d_hidden[part]).mul_(counts[part])
        if need_table and d_logits is not None:
            d_table = _plus_product(d_table, d_logits.T, hidden[part] * counts[part], loss.dtype)
        del d_logits  # the next logits then reuse the same memory in the cache
    per_token = torch.cat(losses)
    if need_table and d_table is None:  # no tokens
        d_table = torch.zeros_like(table, dtype=per_token.dtype)
    if per_token.is_cpu:
        _repair(per_token, hidden, table, targets)
    return per_token, d_hidden, d_table


def _one_chunk(logits: Tensor, target: Tensor, need_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The losses of some tokens, and the gradient of the logits in their dtype: p - onehot(target)."""
    if not need_gradient:
        full = at_least_float32(logits)
        return (full.logsumexp(-1, keepdim=True) - full.gather(1, target)).squeeze(1), None
    if logits.is_cpu:
        # Row by row, in place: the logits pass through memory once. Where the probability is subnormal, the
        # loss is recomputed later, which reads values back: other devices would have to synchronize for it.
        full = at_least_float32(logits)
        full = torch.softmax(full, -1, out=full)
        of_target = full.gather(1, target)
        log_of_target = of_target.log()
    else:
        full = torch.log_softmax(logits, -1, dtype=torch.float32 if logits.dtype.itemsize < 4 else None)
        log_of_target = full.gather(1, target)
        of_target = log_of_target.exp()
        full.exp_()
    return -log_of_target.squeeze(1), full.scatter_(1, target, of_target - 1).to(logits.dtype)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, summed in a dtype at least as precise as that of a and b; `total` may be used up."""
    if a.dtype != dtype and _has_precise_products(a):
        product = torch.mm(a, b, out_dtype=dtype)  # `addmm` takes no float32 total before torch 2.10
        return product if total is None else total.add_(product)
    if total is None:
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    return total.addmm_(a.to(dtype), b.to(dtype))  # in place: autocast would use the lower precision again


def _has_precise_products(x: Tensor) -> bool:
    """Whether products of half precision can have a float32 result: with CUDA, since torch 2.8."""
    on_gpu = x.is_cuda or x.is_meta
    return on_gpu and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")


def _tokens_at_once(table: Tensor) -> int:
    """On a CPU, as many as a vector is long: the table's gradient, which every chunk adds to, is then no larger than
    logits. Products with fewer than 512 rows are slow, even where their logits would stay in the cache: the table is
    packed again for each of them. On a GPU, fewer chunks are faster.
    """
    V, D = table.shape
    if not table.is_cpu:
        return max(1, MOST_LOGITS_ON_GPU // V)
    return max(1, min(max(D, FEWEST_TOKENS, FEWEST_LOGITS // V), MOST_LOGITS // V))


def _repair(per_token: Tensor, hidden: Tensor, table: Tensor, targets: Tensor) -> None:
    """Recompute losses so large that the probability was rounded to zero, from the logits, in place."""
    lost = (per_token > EXACT_UP_TO).nonzero().squeeze(1)
    if len(lost) == 0:
        return
    for part in lost.split(_tokens_at_once(table)):
        per_token[part] = _one_chunk(hidden[part] @ table.T, targets[part], need_gradient=False)[0]

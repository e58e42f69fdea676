"""`model.loss` is the cross-entropy of the model's logits, with the same gradients, without ever holding all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from block_recurrent.ops import cross_entropy
from block_recurrent.ops import loss as loss_module
from block_recurrent.ops.precision import MetaAutocast
from block_recurrent.train.meta import Trace


@pytest.fixture(params=[None, 1, 60, 23 * 5], ids=lambda held: f"held-{held}")
def held(request, monkeypatch):
    """Logits held at once: all, those of one token (though even that is too many), of two, of five."""
    if request.param is not None:
        monkeypatch.setattr(loss_module, "MOST_LOGITS", request.param)


@pytest.fixture
def text(tokens):
    return tokens(2, 11)


def expected_loss(model, text, mask=None, memory=None, starts=None):
    logits, _ = model(text[:, :-1], memory, starts)
    nats = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none").view(text[:, 1:].shape)
    return nats if mask is None else nats * mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("held")
def test_sum_count_and_gradients(system, make_model, text, masked):
    model = make_model(system)
    mask = torch.rand(2, 10, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None
    parameters = list(model.parameters())
    found = model.loss(text[:, :-1], text[:, 1:], mask=mask)
    nats = expected_loss(model, text, mask)
    # The sum is float32, as a training step wants it.
    assert found.sum.dtype == found.count.dtype == torch.float32
    assert found.count == (20 if mask is None else mask.sum())
    assert found.sum.item() == pytest.approx(nats.sum().item(), rel=1e-6)
    ours = torch.autograd.grad(found.sum / found.count, parameters, allow_unused=True)
    theirs = torch.autograd.grad(nats.sum() / found.count, parameters, allow_unused=True)
    for (name, _), one, other in zip(model.named_parameters(), ours, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_per_token_is_every_token_counted_or_not(make_model, text):
    model = make_model("rec-lstm-single")
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 3] = True
    found = model.loss(text[:, :-1], text[:, 1:], mask=mask)
    nats = expected_loss(model, text)
    assert found.per_token.shape == (2, 10)
    assert found.per_token.dtype == torch.float32
    assert not found.per_token.requires_grad
    torch.testing.assert_close(found.per_token, nats.float(), atol=1e-5, rtol=0)
    assert found.sum.item() == pytest.approx(nats[0, 3].item(), rel=1e-6)
    assert found.count == 1


def test_a_mask_of_nothing_has_no_loss_and_no_gradient(make_model, text):
    model = make_model("rec-fixed-skip")
    found = model.loss(text[:, :-1], text[:, 1:], mask=torch.zeros(2, 10, dtype=torch.bool))
    found.sum.backward()
    assert found.sum == found.count == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_masked_targets_do_not_matter(make_model, text):
    model = make_model("slide")
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 4:] = False
    other = text[:, 1:].clone()
    other[1, 4:] = 0
    one = model.loss(text[:, :-1], text[:, 1:], mask=mask)
    two = model.loss(text[:, :-1], other, mask=mask)
    assert torch.equal(one.sum, two.sum)
    for a, b in zip(*(torch.autograd.grad(x.sum, list(model.parameters())) for x in (one, two)), strict=True):
        assert torch.equal(a, b)


def test_memory_starts_and_lengths_go_through(make_model, text, tokens):
    model = make_model("rec-fixed-dual")
    _, memory = model(tokens(2, 6, seed=3))
    starts, lengths = torch.tensor([False, True]), torch.tensor([10, 7])
    found = model.loss(text[:, :-1], text[:, 1:], memory, starts, lengths=lengths)
    nats = expected_loss(model, text, memory=memory, starts=starts)
    real = torch.arange(10) < lengths[:, None]
    torch.testing.assert_close(found.per_token[real], nats[real].float(), atol=1e-5, rtol=0)
    assert found.memory.tokens_read.tolist() == [16, 7]
    assert found.memory.equals(model(text[:, :-1], memory, starts, lengths)[1])


def test_without_gradient_nothing_is_kept(make_model, text):
    model = make_model("slide")
    with torch.no_grad():
        found = model.loss(text[:, :-1], text[:, 1:])
    assert not found.sum.requires_grad
    assert found.sum.item() == pytest.approx(expected_loss(model, text).sum().item(), rel=1e-6)


@pytest.mark.usefixtures("held")
def test_the_function_by_finite_differences():
    torch.manual_seed(0)
    hidden, table = torch.randn(7, 4).double(), torch.randn(23, 4).double()
    targets, counts = torch.randint(23, (7,)), torch.tensor([True, True, False, True, False, True, True])
    inputs = (hidden.requires_grad_(), table.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, t: cross_entropy(h, t, targets, counts).total * 1.7, inputs)
    assert torch.autograd.gradcheck(lambda h: cross_entropy(h, table.detach(), targets, counts).total, inputs[:1])
    assert torch.autograd.gradcheck(lambda t: cross_entropy(hidden.detach(), t, targets, counts).total, inputs[1:])


def test_products_on_a_gpu(monkeypatch):
    """In bfloat16, with the table's gradient in float32: by an operator that torch has for these dtypes since 2.8."""
    monkeypatch.setattr(loss_module, "MOST_LOGITS_ON_GPU", 23 * 3)
    hidden, table = (torch.randn(rows, 4, device="meta").requires_grad_() for rows in (7, 23))
    targets, counts = torch.empty(7, dtype=torch.int64, device="meta"), torch.empty(7, dtype=torch.bool, device="meta")
    with Trace() as trace, MetaAutocast(torch.bfloat16):
        found = cross_entropy(hidden, table, targets, counts)
    assert trace.kernels["mm"] == 3 * 3
    assert trace.kernels["addmm"] == trace.kernels["addmm_"] == 0
    assert {dtype for dtype, _ in trace.products} == {torch.bfloat16}
    found.total.backward()
    assert hidden.grad.dtype == table.grad.dtype == torch.float32
    assert cross_entropy(hidden[:0], table, targets[:0], counts[:0]).total.dtype == torch.float32


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    table = torch.tensor([[1.0], [-1.0]])
    found = cross_entropy(hidden, table, torch.tensor([0, 0]), torch.tensor([True, True]))
    assert found.per_token.tolist() == [0.0, 600.0]
    found.total.backward()
    assert hidden.grad.tolist() == [[0.0], [-2.0]]


def test_half_precision_sums_in_float32():
    """float16 stands for both: there are CPUs where a bfloat16 product ends the process."""
    torch.manual_seed(0)
    hidden, table = (torch.randn(n, 8).half().requires_grad_() for n in (50, 23))
    targets, counts = torch.randint(23, (50,)), torch.ones(50, dtype=torch.bool)
    found = cross_entropy(hidden, table, targets, counts)
    expected = F.cross_entropy((hidden @ table.T).float(), targets, reduction="none")
    assert found.total.dtype == found.per_token.dtype == torch.float32
    torch.testing.assert_close(found.per_token, expected, atol=2e-2, rtol=1e-2)
    found.total.backward()
    assert hidden.grad.dtype == table.grad.dtype == torch.float16


def test_padding_behind_a_lane_does_not_count(make_model, text):
    """Without a mask, the tokens that `lengths` says are real count, and no others."""
    model = make_model("slide")
    lengths = torch.tensor([10, 4])
    found = model.loss(text[:, :-1], text[:, 1:], lengths=lengths)
    assert found.count == 14
    nats = expected_loss(model, text)
    assert found.sum.item() == pytest.approx((nats[0].sum() + nats[1, :4].sum()).item(), rel=1e-6)

"""Normalisation and position bias, by hand."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.nn.norm import RMSNorm
from block_recurrent.nn.position import PositionBias
from block_recurrent.ops import unit_length


def test_rmsnorm_has_a_scale_and_no_mean():
    norm = RMSNorm(4).double()
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, -1.0]).double()
    x = torch.randn(2, 3, 4).double() + 5
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=0)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_epsilon_is_inside_the_root():
    """On numbers so small that it decides."""
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(RMSNorm(4).double()(x), x / (2e-6) ** 0.5, atol=1e-12, rtol=0)
    torch.testing.assert_close(unit_length(x), x / (4e-6 + 1e-6) ** 0.5, atol=1e-12, rtol=0)
    assert not unit_length(torch.zeros(1, 4)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_normalised_in_float32(dtype):
    """Squares of 300 overflow in float16, and their sum loses digits in bfloat16."""
    x = (torch.arange(1, 65)[None] * 5.0).to(dtype)
    for function in (RMSNorm(64).to(dtype), unit_length):
        found = function(x)
        assert found.dtype == dtype
        wide = x.float()
        exact = RMSNorm(64)(wide) if function is not unit_length else unit_length(wide)
        torch.testing.assert_close(found, exact.to(dtype), atol=0, rtol=1e-2)
        assert found.isfinite().all()


def test_position_bias_begins_at_distance_one():
    bias = PositionBias(2)
    bias.table.data = torch.arange(64.0).view(2, 32)
    found = bias(200).flip(-1)  # the nearest key is the last one
    assert found.shape == (2, 200)
    assert found[0, :15].tolist() == list(range(1, 16))
    assert found[0, 15] == 16  # distance 16: the first of the growing buckets
    assert found[0, 126] == found[0, 199] == 31
    assert torch.equal(found[1], found[0] + 32)


def test_position_bias_has_a_gradient_where_it_is_used():
    bias = PositionBias(2)
    bias(20).sum().backward()
    assert not bias.table.grad[:, 0].any()
    assert (bias.table.grad[:, 1:17] > 0).all()
    assert not bias.table.grad[:, 18:].any()


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_gradients_of_the_norms(size):
    """By finite differences; at 1e-3, epsilon matters as much as the numbers."""
    torch.manual_seed(0)
    x = (size * torch.randn(2, 3, 4, 5, dtype=torch.float64)).requires_grad_()
    weight, scale = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((5,), (3, 1, 1)))
    norm = RMSNorm(5)

    def rms(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    step = {"eps": 1e-6 * size, "atol": 1e-4, "rtol": 1e-4}
    assert torch.autograd.gradcheck(rms, (x, weight), **step)
    assert torch.autograd.gradcheck(rms, (x[0, 0], weight), **step)
    assert torch.autograd.gradcheck(unit_length, (x,), **step)
    assert torch.autograd.gradcheck(unit_length, (x, scale), **step)


def test_unit_length_times_a_scale_per_head():
    x, scale = torch.randn(2, 3, 4, 5).double(), torch.tensor([1.0, -2.0, 0.0]).double().view(3, 1, 1)
    expected = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(unit_length(x), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(unit_length(x, scale), expected * scale, atol=1e-12, rtol=0)


def test_a_zero_vector_has_a_finite_gradient():
    x = torch.zeros(1, 1, 1, 4, requires_grad=True)
    (unit_length(x).sum() + RMSNorm(4)(x).sum()).backward()
    assert x.grad.isfinite().all()

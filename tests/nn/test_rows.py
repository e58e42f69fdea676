"""Products of few rows: in parts they are what they are in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from block_recurrent.nn import rows

SHAPES = [(96, 32), (32, 96), (32, 32), (33, 16), (1, 7)]


@pytest.fixture(params=["in one piece", "in parts"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine, whatever it has."""
    monkeypatch.setattr(rows, "_mkl_on_amd", lambda: request.param == "in parts")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_product_is_the_plain_one(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = draw(*shape), draw(num_rows, shape[1])
    for copy in (False, True):
        torch.testing.assert_close(rows.times(weight, copy)(x), x @ weight.T)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_sum_is_the_plain_one(shape: tuple[int, int], num_rows: int) -> None:
    weight, x, y = draw(*shape), draw(num_rows, shape[0]), draw(num_rows, shape[1])
    before = x.clone()
    torch.testing.assert_close(rows.adding_times(weight)(x, y), x + y @ weight.T)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("_both_ways")
def test_of_two_precisions_a_sum_has_the_higher_one() -> None:
    weight, x, y = draw(32, 16), draw(1, 32).double(), draw(1, 16)
    total = rows.adding_times(weight)(x, y)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, x + y @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_both_ways")
def test_gradients_pass() -> None:
    weight, x = draw(32, 16).requires_grad_(), draw(1, 16).requires_grad_()
    expected = torch.autograd.grad((x @ weight.T).square().sum(), (weight, x))
    found = torch.autograd.grad(rows.times(weight)(x).square().sum(), (weight, x))
    torch.testing.assert_close(found, expected)


def test_a_single_core_has_nothing_to_share_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_mkl_on_amd", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert getattr(rows.times(draw(8, 4)), "func", None) is torch.mm

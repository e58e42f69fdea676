"""Dropout: the right share, the right mean, independent draws, and nothing outside of training."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.ops.dropout import dropout, keep_mask


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_share_and_mean(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(1001, 997)
    y = dropout(x, rate)
    assert (y == 0).float().mean().item() == pytest.approx(rate, abs=2e-3)
    assert y.mean().item() == pytest.approx(1.0, abs=1e-2)
    assert len(y.unique()) == 2


def test_neighbours_are_independent() -> None:
    """Four masks come from one random number: none may follow from another."""
    torch.manual_seed(0)
    keep = keep_mask(torch.empty(400_000), 0.5).double().view(-1, 8)
    correlation = torch.corrcoef(keep.T) - torch.eye(8)
    assert correlation.abs().max().item() < 0.02
    assert keep.mean(0).sub(0.5).abs().max().item() < 0.01


def test_off() -> None:
    x = torch.randn(5, 7)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x


def test_gradient_goes_where_the_value_went() -> None:
    torch.manual_seed(1)
    x = torch.ones(64, 64, requires_grad=True)
    y = dropout(x, 0.4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_same_seed_same_mask() -> None:
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(keep_mask(torch.empty(3, 5), 0.5))
    assert torch.equal(*masks)
    assert masks[0].shape == (3, 5)

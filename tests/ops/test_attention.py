"""Window attention against its definition, one query at a time."""

from __future__ import annotations

import pytest
import torch

from block_recurrent.ops import attend, backend, merge_heads, split_heads, window_attention


def by_definition(q, k, v, bias):
    """Query i, at position W + i, over the W keys before it: distances 1 to W, not itself."""
    W = bias.shape[1]
    rows = []
    for i in range(q.shape[2]):
        distances = torch.arange(1, W + 1)
        places = W + i - distances
        logits = torch.einsum("bhk,bhnk->bhn", q[:, :, i], k[:, :, places]) + bias[:, W - distances]
        rows.append(torch.einsum("bhn,bhnk->bhk", logits.softmax(-1), v[:, :, places]))
    return torch.stack(rows, dim=2)


def inputs(lanes, heads, queries, window, width, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(lanes, heads, queries, width), *[(lanes, heads, window + queries, width)] * 2, (heads, window)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


# Fewer and more queries than a window, than a tile of 64 and than several tiles; one lane and many.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 1, 5, 4),
    (2, 3, 4, 5, 4),
    (2, 3, 5, 5, 4),
    (2, 3, 13, 5, 4),
    (2, 2, 70, 3, 2),
    (1, 2, 130, 16, 3),
    (3, 2, 128, 64, 3),
    (1, 2, 7, 100, 3),
    (1, 1, 200, 150, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["tiled", "reference"])
def test_values_and_gradients_are_those_of_the_definition(name, shape):
    given = inputs(*shape)
    with backend(name):
        found, expected = window_attention(*given), by_definition(*given)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), given) for out in (found, expected))
    for name, one, other in zip(("q", "k", "v", "bias"), ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_float32():
    given = inputs(2, 2, 130, 20, 8, torch.float32)
    torch.testing.assert_close(window_attention(*given), by_definition(*given), atol=1e-5, rtol=0)


def test_inputs_that_are_views_of_other_tensors():
    """Heads come from a transposed view, keys from a slice; some inputs need no gradient."""
    q, k, v, bias = inputs(2, 3, 70, 6, 4)
    q_view = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    k_view, v_view = (torch.cat([torch.zeros_like(x[:, :, :3]), x.detach()], dim=2)[:, :, 3:] for x in (k, v))
    found = window_attention(q_view, k_view, v_view.requires_grad_(), bias)
    expected = by_definition(q, k, v, bias)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (v_view, bias)),
        torch.autograd.grad((expected * weights).sum(), (v, bias)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_no_queries():
    q, k, v, bias = inputs(2, 3, 0, 5, 4)
    assert window_attention(q, k, v, bias).shape == (2, 3, 0, 4)


def test_dropout_scales_what_it_keeps_and_its_gradient_matches():
    """With values of one, each output is the sum of the weights that stay; its mean is one."""
    q, k, _, bias = inputs(2, 2, 100, 16, 4)
    v = torch.ones_like(k).detach().requires_grad_()
    out = window_attention(q, k, v, bias, 0.25)
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)
    assert out.std() > 0.05
    # The output is linear in v, so the gradient of its sum has the same numbers as the output.
    (d_v,) = torch.autograd.grad(out.sum(), v)
    assert (d_v * v).sum().item() == pytest.approx(out.sum().item())


def test_the_gradient_under_dropout_is_right():
    """Finite differences with the same random numbers."""
    given = inputs(1, 2, 9, 4, 3)

    def dropped(*x):
        torch.manual_seed(3)
        return window_attention(*x, 0.4)

    assert torch.autograd.gradcheck(dropped, given)


def test_attend_is_a_softmax_without_scale_or_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4).double() for n in (5, 7, 7))
    expected = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v), expected, atol=1e-12, rtol=0)


def test_heads_split_and_merge():
    x = torch.arange(24.0).view(1, 2, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (1, 3, 2, 4)
    assert heads[0, 1, 0].tolist() == [4, 5, 6, 7]
    assert torch.equal(merge_heads(heads), x)


def test_second_order_gradients_are_refused_or_right():
    """A backward pass that can't be differentiated says so; the reference's can be."""
    given = inputs(1, 1, 5, 4, 3)
    with backend("tiled"):
        (first,) = torch.autograd.grad(window_attention(*given).square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with backend("reference"):
        assert torch.autograd.gradgradcheck(window_attention, given)

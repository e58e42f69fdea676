"""The Triton kernels, run by Triton's interpreter on a CPU, against the reference in float64.

`tests/conftest.py` turns the interpreter on before anything can import triton.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.errors import ConfigError
from block_recurrent.ops import (
    add_dropout,
    backend,
    residual_norm,
    rms_norm,
    split_heads,
    token_heads,
    triton,
    unit_heads,
    window_attention,
)
from block_recurrent.ops.triton import LEVELS
from block_recurrent.ops.triton.attention import triton_window_attention

needs_triton = pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
pytestmark = needs_triton
NAMES = ("q", "k", "v", "bias")


def reference(*given):
    with backend("reference"):
        return window_attention(*given)


def inputs(B, H, N, W, K, dtype=torch.float32):
    """Keys of unit length and queries with a scale, as the model has them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, length, K) for length in (N, W + N, W + N))
    given = [3 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.randn(H, W)]
    return [x.to(dtype if x.ndim == 4 else torch.float32).requires_grad_() for x in given]


def gradients(out, given, weights):
    return torch.autograd.grad((out * weights.to(out.dtype)).sum(), given)


def check(given, found, expected_of, tolerance=1e-5):
    """Values, and gradients of a random sum; gradients relative to their largest number, for they are long sums."""
    precise = [x.detach().double().requires_grad_() for x in given]
    expected = expected_of(*precise)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(found)
    both = zip(NAMES, gradients(found, given, weights), gradients(expected, precise, weights), strict=True)
    for name, one, other in both:
        assert one.dtype == dict(zip(NAMES, given, strict=True))[name].dtype
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(
            one.double() / scale, other / scale, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


# B, H, N, W, K: nothing that divides a tile, N < W and N > W, windows from 1 to 512, head sizes from 1 to 256.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 4),
    (2, 1, 64, 1, 32),
    (2, 3, 100, 1, 128),
    (1, 2, 64, 64, 64),
    (1, 2, 49, 100, 32),
    (2, 2, 133, 63, 16),
    (1, 1, 70, 512, 64),
    (1, 1, 130, 65, 65),
    (1, 1, 97, 3, 128),
    (1, 1, 40, 33, 256),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape):
    given = inputs(*shape)
    check(given, triton_window_attention(*given, 0.0), reference)


@pytest.mark.parametrize("shape", [(2, 2, 70, 33, 32), (1, 1, 40, 33, 256)], ids=str)
def test_bfloat16(shape):
    """Weights are rounded before the second product, as the reference rounds them."""
    given = inputs(*shape, torch.bfloat16)
    out = triton_window_attention(*given, 0.0)
    assert out.dtype == torch.bfloat16
    check(given, out, reference, tolerance=2e-2)


def kept_weights(given, dropout, seed):
    """The mask of dropout, seen by values that are rows of a unit matrix: (B, H, N, W + N), scaled."""
    q, k, _, bias = (x.detach() for x in given)
    values = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    masks = []
    for part in values.split(k.shape[3], dim=3):
        part = F.pad(part, (0, k.shape[3] - part.shape[3]))
        whole = triton_window_attention(q, k, part, bias, 0.0)
        torch.manual_seed(seed)
        dropped = triton_window_attention(q, k, part, bias, dropout)
        masks.append(torch.where(whole > 0, dropped / whole, 0.0))
    return torch.cat(masks, dim=3)[..., : k.shape[2]]


@pytest.mark.parametrize("shape", [(2, 1, 70, 33, 64), (1, 1, 20, 100, 64)], ids=str)
def test_dropout_and_its_gradients(shape):
    rate, given = 0.25, inputs(*shape)
    mask = kept_weights(given, rate, seed=5)
    assert torch.all((mask == 0) | ((mask - 1 / (1 - rate)).abs() < 1e-4))

    def by_mask(q, k, v, bias):
        _, _, N, W, _ = shape
        distances = torch.arange(W + N) - torch.arange(N)[:, None]
        seen = (distances >= 0) & (distances < W)
        logits = (q @ k.mT + bias[:, distances.clamp(0, W - 1)]).masked_fill(~seen, float("-inf"))
        return (logits.softmax(-1) * (mask > 0) / (1 - rate)) @ v

    torch.manual_seed(5)
    check(given, triton_window_attention(*given, rate), by_mask)


def test_dropout_is_at_its_rate_and_independent():
    rate, (B, H, N, W, K) = 0.1, (2, 2, 64, 64, 128)
    given = inputs(B, H, N, W, K)
    mask = kept_weights(given, rate, seed=1)
    distances = torch.arange(W + N) - torch.arange(N)[:, None]
    by_distance = mask.gather(3, (torch.arange(N)[:, None] + torch.arange(W)).expand(B, H, -1, -1)) == 0
    assert not (mask[:, :, (distances < 0) | (distances >= W)] != 0).any()
    bound = 4.5 * (rate * (1 - rate) / by_distance.numel()) ** 0.5
    assert abs(by_distance.double().mean().item() - rate) < bound
    dropped = by_distance.double() - rate
    pairs = [dropped[:, :, :, 1:] * dropped[:, :, :, :-1], dropped[:, :, 1:] * dropped[:, :, :-1]]
    pairs += [dropped[:, 1:] * dropped[:, :-1], dropped[1:] * dropped[:-1]]
    for product in pairs:  # neighbouring distances, queries, heads and lanes
        assert abs(product.mean().item()) < 4.5 * rate * (1 - rate) / product.numel() ** 0.5
    assert round(rate * LEVELS) / LEVELS == pytest.approx(rate, abs=1e-9)


def test_dropout_follows_the_seed_of_torch():
    given = inputs(1, 1, 10, 8, 16)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(triton_window_attention(*given, 0.5))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("fixed", [1, 64, 100, 130])
def test_fixed_keys_get_no_gradient_and_change_no_other(fixed):
    given = inputs(1, 2, 70, 100, 16)
    weights = torch.randn(1, 2, 70, 16)
    every = gradients(triton_window_attention(*given, 0.0), given, weights)
    some = gradients(triton_window_attention(*given, 0.0, fixed), given, weights)
    assert torch.equal(some[0], every[0])
    assert torch.equal(some[3], every[3])
    for one, other in zip(some[1:3], every[1:3], strict=True):
        assert torch.equal(one[:, :, fixed:], other[:, :, fixed:])
        assert not one[:, :, :fixed].any()


def test_grids_of_any_number_of_heads(monkeypatch):
    """A GPU has at most 65,535 programs along every dimension of a grid but the first."""
    from block_recurrent.ops.triton import attention_kernels

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("forward", "queries_backward", "keys_backward"):
        monkeypatch.setattr(attention_kernels, name, Kernel())
    triton_window_attention(*inputs(70_000, 2, 3, 1, 1), 0.0).sum().backward()
    assert len(grids) == 3
    for first, *others in grids:
        assert 140_000 <= first < 2**31
        assert max(others, default=1) < 2**16


def test_views_of_other_tensors():
    """Queries that are part of a larger projection, keys that are part of a longer cache, values turned around."""
    torch.manual_seed(0)
    given = [torch.randn(shape).requires_grad_() for shape in ((2, 70, 9, 8), (2, 3, 200, 8), (2, 3, 8, 90), (3, 20))]

    def through(function):
        def of(joint, k, v, bias):
            return function(joint.transpose(1, 2)[:, 3:6], k[:, :, 50:140], v.transpose(2, 3), bias)

        return of

    check(given, through(lambda *x: triton_window_attention(*x, 0.0))(*given), through(reference))


def test_far_keys_count_for_nothing():
    """Whatever stands before the window and after a query: not a bit changes."""
    q, k, v, bias = (x.detach() for x in inputs(1, 2, 100, 37, 16))
    before = triton_window_attention(q, k, v, bias, 0.0)
    k[:, :, 37 + 50 :], v[:, :, 37 + 50 :] = 1e4, 1e30
    k[:, :, :20], v[:, :, :20] = 1e4, 1e30
    after = triton_window_attention(q, k, v, bias, 0.0)
    assert torch.equal(after[:, :, 20:51], before[:, :, 20:51])


def test_the_operator_is_registered_as_torch_wants_it():
    given = inputs(1, 2, 5, 4, 16)
    seed = torch.zeros(1, dtype=torch.int64)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.brt.triton_attention.default, (*given, seed, 0.0, 0), test_utils=utilities)


def test_second_order_gradients_are_refused():
    given = inputs(1, 2, 5, 4, 16)
    (first,) = torch.autograd.grad(triton_window_attention(*given, 0.0).square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_model_gives_the_same_with_it():
    """Over two segments, the second with keys of the first in its cache."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=50, window=4, segment=8)).eval()
    tokens = torch.randint(50, (2, 21))

    def run():
        model.zero_grad()
        first = model.loss(tokens[:, :10], tokens[:, 1:11])
        second = model.loss(tokens[:, 10:-1], tokens[:, 11:], first.memory.detach())
        (first.sum + second.sum).backward()
        return torch.cat([first.per_token, second.per_token]), [p.grad for p in model.parameters()]

    with backend("triton"):
        found = run()
    with backend("reference"):
        expected = run()
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        triton_window_attention(*inputs(1, 1, 4, 4, 16), 0.0)


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (600, 100)], ids=str)
def test_rms_norm(shape):
    torch.manual_seed(0)
    given = [torch.randn(shape).requires_grad_(), torch.randn(shape[-1]).requires_grad_()]
    same_as_the_reference(rms_norm, given)


@pytest.mark.parametrize("width", [16, 100])
def test_a_sum_and_its_norm(width):
    """Gradients flow through both results, as around a branch and into it."""
    torch.manual_seed(0)
    given = [torch.randn(2, 7, width), torch.randn(2, 7, width), torch.randn(width)]

    def both(x, added, weight):
        return torch.cat(residual_norm(x, weight, added), dim=-1)

    def one(x, weight):
        return torch.cat(residual_norm(x, weight), dim=-1)

    same_as_the_reference(both, [x.requires_grad_() for x in given])
    same_as_the_reference(one, [given[0], given[2]])


def test_dropout_of_a_norm_and_in_front_of_a_sum():
    """What is dropped, and its gradient, are those of one mask; the rest is scaled up."""
    rate = 0.25
    x, added, weight = (torch.randn(shape).requires_grad_() for shape in ((200, 48), (200, 48), (48,)))
    with backend("triton"):
        plain, dropped = rms_norm(x, weight), rms_norm(x, weight, rate)
        total = add_dropout(x, added, rate)
    masks = [dropped / plain, (total - x) / added]
    gradients_of = [torch.autograd.grad(dropped.sum(), weight)[0], torch.autograd.grad(total.sum(), [x, added])]
    for mask in masks:
        kept = mask.detach() > 0.5
        torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - rate)), atol=1e-3, rtol=1e-3)
        assert torch.all(mask[~kept].abs() < 1e-3)
        assert abs(kept.double().mean().item() - (1 - rate)) < 4.5 * (rate * (1 - rate) / kept.numel()) ** 0.5
        assert kept.any(0).all(), "every column is kept somewhere"
    assert not torch.equal(masks[0] > 0.5, masks[1] > 0.5), "each call draws its own"
    by_mask = ((masks[0] > 0.5) * (plain / weight) / (1 - rate)).sum(0)
    torch.testing.assert_close(gradients_of[0], by_mask, atol=1e-3, rtol=1e-4)
    assert torch.equal(gradients_of[1][0], torch.ones_like(x))
    torch.testing.assert_close(gradients_of[1][1], (masks[1] > 0.5) / (1 - rate))


@pytest.mark.parametrize(("groups", "cached", "grows"), [(3, 8, True), (4, 30, True), (4, 8, False)])
def test_heads_behind_cached_ones(groups, cached, grows):
    """Fewer and more cached ones than tokens; gradients flow into the caches, from all that comes out."""
    torch.manual_seed(0)
    H, K, N, lanes = 2, 12, 21, 2
    given = [torch.randn(lanes, N, groups * H * K), torch.randn((groups - 1) * H, 1, 1)]
    given = [x.requires_grad_() for x in given]
    caches = [torch.randn(lanes, H, cached, K).requires_grad_(grows) for _ in range(2)]

    def joined(projected, scales, *old):
        values, keys = old or (x.to(projected.dtype) for x in caches)
        found = token_heads(split_heads(projected, groups * H), scales, values, keys, (N,) * lanes)
        return torch.cat([x for x in found if x is not None], dim=2)

    same_as_the_reference(joined, given + caches if grows else given)


def test_next_caches_without_a_gradient_of_their_own():
    """As in a training step: what is kept for the next one is cut off."""
    heads, scales = torch.randn(1, 5, 3 * 16).requires_grad_(), torch.ones(2, 1, 1).requires_grad_()
    old = [torch.randn(1, 1, 4, 16) for _ in range(2)]

    def used(heads, scales):
        found = token_heads(split_heads(heads, 3), scales, *(x.to(heads.dtype) for x in old), (5,))
        return torch.cat([found.values, found.keys, found.queries], dim=2)

    same_as_the_reference(used, [heads, scales])


@pytest.mark.parametrize(("groups", "lanes"), [(3, 1), (4, 2)])
def test_unit_heads(groups, lanes):
    """Heads that are views of a projection; more tokens than a program has."""
    torch.manual_seed(0)
    projected = torch.randn(lanes, 21, groups * 2 * 12).requires_grad_()
    scales = torch.randn((groups - 1) * 2, 1, 1).requires_grad_()

    def joined(projected, scales):
        return torch.cat(unit_heads(split_heads(projected, groups * 2), scales), dim=1)

    same_as_the_reference(joined, [projected, scales])


def test_heads_of_half_precision():
    """Gradients are computed from rounded results."""
    torch.manual_seed(0)
    projected, scales = torch.randn(2, 21, 4 * 2 * 32), torch.rand(6, 1, 1) + 0.5

    def joined(projected, scales):
        return torch.cat(unit_heads(split_heads(projected, 8), scales), dim=1)

    same_as_the_reference(joined, [projected.bfloat16().requires_grad_(), scales.requires_grad_()], tolerance=1e-2)


def test_a_scale_of_zero():
    """Of a head that is switched off: no gradient, and others have theirs."""
    projected, scales = torch.randn(1, 5, 3 * 16).requires_grad_(), torch.tensor([0.0, 2.0]).view(2, 1, 1)
    weights = torch.randn(1, 3, 5, 16)
    found = []
    for name in ("triton", "reference"):
        with backend(name):
            out = torch.cat(unit_heads(split_heads(projected, 3), scales), dim=1)
        found.append(torch.autograd.grad((out * weights).sum(), projected)[0])
    torch.testing.assert_close(*found)
    assert not found[0][:, :, 16:32].any()


def same_as_the_reference(function, given, tolerance=1e-5):
    with backend("triton"):
        found = function(*given)
    precise = [x.detach().double().requires_grad_() for x in given]
    with backend("reference"):
        expected = function(*precise)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(found)
    both = zip(gradients(found, given, weights), gradients(expected, precise, weights), strict=True)
    for one, other in both:
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double() / scale, other / scale, atol=tolerance, rtol=0)


def test_norms_are_registered_as_torch_wants_them():
    x, weight = torch.randn(3, 16).requires_grad_(), torch.randn(16).requires_grad_()
    heads, scales = torch.randn(1, 6, 5, 16).requires_grad_(), torch.randn(4).requires_grad_()
    old, seed = torch.randn(1, 2, 3, 16), torch.tensor([5])
    calls = {
        "triton_rms": (x, x.detach().clone(), weight, seed, 1e-6, torch.float32, 0.5),
        "triton_add_dropout": (x, x.detach().clone(), seed, 0.5),
        "triton_heads": (heads, scales, old, old.clone(), 1e-6),
    }
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.brt, name).default, arguments, test_utils=utilities)

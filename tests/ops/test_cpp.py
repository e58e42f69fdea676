"""The kernels in C against torch in float64: values, gradients, dropout, odd shapes."""

from __future__ import annotations

import platform
import shutil

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.ops import attend, backend, cpp, cross_entropy, unit_heads, window_attention
from block_recurrent.ops.cpp import attention
from block_recurrent.ops.cpp.norm import cpp_norm
from block_recurrent.ops.norm import EPSILON

from ..conftest import BUILDS, CAPABILITY


def cpp_window_attention(q, k, v, bias, dropout=0.0, fixed_keys=0):
    return attention.cpp_window_attention(q, k, v, bias, dropout, fixed_keys)


def cpp_attend(q, k, v):
    return attention.cpp_attend(q, [k], [v], 0.0)


def reference(function):
    def forced(*given):
        with backend("reference"):
            return function(*given)

    return forced


def search(q, keys, visible, n):
    return torch.ops.brt.knn_search(q, keys, visible, n)


def losses_and_gradients(hidden, table, targets, counts, *need):
    _, losses, d_hidden, d_table = torch.ops.brt.cross_entropy(hidden, table, targets, counts.float(), *need)
    return losses, d_hidden, d_table


@pytest.mark.skipif(
    platform.system() != "Linux" or CAPABILITY not in BUILDS or shutil.which("gcc") is None,
    reason="kernels are compiled with gcc, on Linux, for AVX2 and AVX-512",
)
def test_the_installation_has_compiled_them():
    assert cpp.LIBRARY is not None


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def check(function, reference, given, tolerance=2e-5):
    """Values, and gradients of a random sum, beside those of the reference in float64."""
    precise = [x.detach().double().requires_grad_() for x in given]
    found, expected = function(*given), reference(*precise)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), given)
    theirs = torch.autograd.grad((expected * weights.double()).sum(), precise)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(
            one.double() / scale, other / scale, atol=tolerance, rtol=0, msg=lambda text, n=number: f"input {n}: {text}"
        )


# B, H, N, W, K: fewer and more queries than a window and than a tile of 48, one and several blocks of 240 keys; nothing
# that divides anything.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 4),
    (2, 3, 64, 16, 12),
    (1, 2, 49, 500, 16),
    (2, 2, 333, 64, 32),
    (1, 2, 300, 37, 65),
    (1, 1, 1300, 130, 20),
    (3, 2, 48, 48, 128),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_attention(build, shape):
    B, H, N, W, K = shape
    given = tensors((B, H, N, K), (B, H, W + N, K), (B, H, W + N, K), (H, W))
    check(cpp_window_attention, reference(window_attention), given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_all_keys(build, shape):
    B, H, N, M, K = shape
    check(cpp_attend, reference(attend), tensors((B, H, N, K), (B, H, M, K), (B, H, M, K)))


def test_logits_that_grow_along_the_keys(build):
    """Softmax is summed block by block: a far higher logit in a later block, and one in an earlier block."""
    q, k, v, bias = tensors((1, 2, 100, 16), (1, 2, 800, 16), (1, 2, 800, 16), (2, 700))
    with torch.no_grad():
        k[:, 0] *= torch.linspace(0, 40, 800)[:, None]
        k[:, 1] *= torch.linspace(40, 0, 800)[:, None]
        bias[:, :300] -= 500
    check(cpp_window_attention, reference(window_attention), [q, k, v, bias], tolerance=2e-4)


@pytest.mark.parametrize("fixed", [1, 37, 240, 250, 300])
def test_fixed_keys_get_no_gradient_and_change_no_other(build, fixed):
    given = tensors((2, 2, 300, 16), (2, 2, 600, 16), (2, 2, 600, 16), (2, 300))
    weights = torch.randn(2, 2, 300, 16)
    all_of_them = torch.autograd.grad((cpp_window_attention(*given, 0.0) * weights).sum(), given)
    some = torch.autograd.grad((cpp_window_attention(*given, 0.0, fixed) * weights).sum(), given)
    assert torch.equal(some[0], all_of_them[0])
    assert torch.equal(some[3], all_of_them[3])
    for one, other in zip(some[1:3], all_of_them[1:3], strict=True):
        assert torch.equal(one[:, :, fixed:], other[:, :, fixed:])
        assert not one[:, :, :fixed].any()


def test_views_of_other_tensors(build):
    """Queries that are part of a larger projection, keys that are part of a tape, values turned around."""
    joint, k, v, bias = tensors((2, 70, 9, 8), (2, 3, 200, 8), (2, 3, 8, 90), (3, 20))

    def attention(function):
        def of(joint, k, v, bias):
            q = joint.transpose(1, 2)[:, 3:6]
            return function(q, k[:, :, 50:140], v.transpose(2, 3), bias)

        return of

    check(
        attention(cpp_window_attention),
        attention(reference(window_attention)),
        [joint, k, v, bias],
    )


def test_dropout_is_the_same_in_both_passes_and_at_its_rate(build):
    """With values that are rows of a unit matrix, the results are the weights themselves, so the mask can be seen."""
    rate, (q, k, bias) = 0.25, tensors((4, 3, 64, 96), (4, 3, 96, 96), (3, 32))
    v = torch.eye(96).expand(4, 3, 96, 96).clone().requires_grad_()
    torch.manual_seed(1)
    dropped = cpp_window_attention(q, k, v, bias, rate)
    whole = cpp_window_attention(q, k, v, bias, 0.0)
    mask = torch.where(whole > 0, dropped / whole, 0.0).detach()
    kept = mask[whole > 0]
    assert torch.all((kept == 0) | ((kept - 1 / (1 - rate)).abs() < 1e-4))
    assert abs((kept == 0).double().mean().item() - rate) < 4 * (rate * (1 - rate) / len(kept)) ** 0.5
    weights = torch.randn_like(whole)
    ours = torch.autograd.grad((dropped * weights).sum(), (q, k, bias))
    theirs = torch.autograd.grad((whole * mask * weights).sum(), (q, k, bias))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    torch.manual_seed(1)
    assert torch.equal(cpp_window_attention(q, k, v, bias, rate), dropped)
    assert not torch.equal(cpp_window_attention(q, k, v, bias, rate), dropped)


def test_not_a_number_stays_in_its_lane(build):
    q, k, v, bias = tensors((2, 1, 60, 16), (2, 1, 80, 16), (2, 1, 80, 16), (1, 20))
    with torch.no_grad():
        q[0, 0, 30, 0] = float("nan")
    out = cpp_window_attention(q, k, v, bias, 0.0)
    assert out[0, 0, 30].isnan().all()
    assert out.isfinite().sum() == out.numel() - 16


def test_far_keys_count_for_nothing(build):
    """Whatever stands before the window and after a query: not a bit changes."""
    q, k, v, bias = (x.detach() for x in tensors((1, 2, 100, 16), (1, 2, 137, 16), (1, 2, 137, 16), (2, 37)))
    before = cpp_window_attention(q, k, v, bias, 0.0)
    k[:, :, 37 + 50 :], v[:, :, 37 + 50 :] = 1e4, 1e30
    k[:, :, :20], v[:, :, :20] = 1e4, 1e30
    after = cpp_window_attention(q, k, v, bias, 0.0)
    assert torch.equal(after[:, :, 20:51], before[:, :, 20:51])


# B, H, queries, K, keys, wanted: one and several panels of 48 keys, and no more keys than are wanted.
SEARCHES = [(1, 1, 1, 1, 1, 1), (2, 3, 50, 20, 700, 32), (1, 2, 100, 64, 240, 7), (2, 1, 33, 16, 40, 40)]


@pytest.mark.parametrize("shape", SEARCHES, ids=str)
@pytest.mark.parametrize("shown", [1.0, 0.5, 0.0])
def test_search(build, shape, shown):
    B, H, w, K, M, n = shape
    q, k = (x.detach() for x in tensors((B, w, H, K), (B, H, M + 5, K)))
    q, k, visible = q.transpose(1, 2), k[:, :, 5:], torch.rand(B, M) < shown
    scores, slots = search(q, k, visible, n)
    every = (q @ k.transpose(-1, -2)).masked_fill(~visible[:, None, None], float("-inf"))
    torch.testing.assert_close(scores.sort(descending=True).values, every.topk(n).values)
    there = scores > float("-inf")
    torch.testing.assert_close(every.gather(-1, slots)[there], scores[there])


def test_search_finds_no_key_twice(build):
    q, k = (x.detach() for x in tensors((1, 1, 40, 16), (1, 1, 1000, 16)))
    _, slots = search(q, k, torch.ones(1, 1000).bool(), 50)
    assert all(len(set(found.tolist())) == 50 for found in slots[0, 0])


def test_search_among_equal_scores(build):
    """Also where there are far more of them than candidates are held, and with zeros of both signs."""
    keys = torch.zeros(1, 1, 1000, 16)
    keys[:, :, ::2] = -0.0
    keys[0, 0, 700:710, 0] = 1
    q = torch.ones(1, 1, 40, 16)
    scores, slots = search(q, keys, torch.ones(1, 1000).bool(), 30)
    assert (scores.sort(descending=True).values == torch.tensor([1.0] * 10 + [0.0] * 20)).all()
    assert all(len(set(found.tolist())) == 30 for found in slots[0, 0])
    assert all(set(range(700, 710)) <= set(found.tolist()) for found in slots[0, 0])


@pytest.mark.parametrize("sign", [1, -1])
def test_search_in_any_order_of_scores(build, sign):
    """Growing along the keys every one is a candidate, falling only the first are."""
    keys = (torch.arange(5000.0) * sign).view(1, 1, -1, 1).repeat(1, 1, 1, 2)
    _, slots = search(torch.ones(1, 1, 33, 2), keys, torch.ones(1, 5000).bool(), 20)
    best = range(4980, 5000) if sign > 0 else range(20)
    assert all(sorted(found.tolist()) == list(best) for found in slots[0, 0])


@pytest.mark.parametrize("shape", SEARCHES, ids=str)
@pytest.mark.parametrize("shown", [1.0, 0.5, 0.0])
def test_attention_over_what_was_found(build, shape, shown):
    """An entry that is not there counts with a logit of 0, and adds nothing."""
    B, H, w, K, M, n = shape
    q, k, v = tensors((B, w, H, K), (B, H, M + 5, K), (B, H, M + 5, K))
    k, v, visible = k.detach()[:, :, 5:], v.detach()[:, :, 5:], torch.rand(B, M) < shown
    scores, slots = search(q.detach().transpose(1, 2), k, visible, n)

    def by_definition(q):
        every = q.transpose(1, 2) @ k.to(q.dtype).transpose(-1, -2)
        there = scores > float("-inf")
        weights = every.gather(-1, slots).where(there, 0).softmax(-1).where(there, 0)
        rows = v.to(q.dtype).gather(2, slots.flatten(2)[..., None].expand(-1, -1, -1, K)).unflatten(2, (w, n))
        return torch.einsum("bhqn,bhqnk->bhqk", weights, rows)

    check(lambda q: torch.ops.brt.knn_attend(q.transpose(1, 2), k, v, scores, slots), by_definition, [q])


@pytest.mark.parametrize("shape", [(1, 1, 3, 16), (2, 5, 7, 32), (1, 3, 100, 48)], ids=str)
def test_norm(build, shape):
    def by_definition(x, weight):
        return x * weight[:, None] / (0.5 * x.square().sum(-1, keepdim=True) + EPSILON).sqrt()

    given = tensors(shape, (shape[1], shape[3]))
    check(lambda x, weight: cpp_norm(x, weight, 0.5, EPSILON), by_definition, given)


def test_unit_heads(build):
    """Values as they are; keys and two kinds of queries at unit length times their scales."""

    def all_parts(function):
        return lambda joint, scales: torch.cat(function(joint.transpose(1, 2), scales), dim=1)

    def by_definition(heads, scales):
        values, others = heads[:, :3], heads[:, 3:]
        return values, others * scales / (others.square().sum(-1, keepdim=True) + EPSILON).sqrt()

    given = tensors((2, 70, 9, 16), (6, 1, 1))
    assert [len(part[0]) for part in unit_heads(given[0].transpose(1, 2), given[1])] == [3, 3, 3]
    check(all_parts(unit_heads), all_parts(by_definition), given)


# Tokens, D, V: chunks of 512 tokens, slabs of 240 pieces.
LOSSES = [(1, 16, 1), (5, 16, 7), (700, 32, 257), (513, 64, 1001), (40, 48, 240), (9, 16, 2000)]


@pytest.mark.parametrize("shape", LOSSES, ids=str)
@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_cross_entropy(build, shape, need):
    N, D, V = shape
    hidden, table = tensors((N, D), (V, D))
    targets, counts = torch.randint(V, (N,)), torch.rand(N) > 0.2
    found = losses_and_gradients(hidden.detach(), table.detach(), targets, counts, *need)
    precise = [x.detach().double().requires_grad_() for x in (hidden, table)]
    expected = cross_entropy(*precise, targets, counts)
    torch.testing.assert_close(found[0].double(), expected.per_token, atol=2e-5, rtol=1e-5)
    wanted = torch.autograd.grad(expected.total, precise)
    for ours, theirs, needed in zip(found[1:], wanted, need, strict=True):
        assert bool(ours.numel()) == needed
        if needed:
            torch.testing.assert_close(ours.double(), theirs, atol=5e-5, rtol=1e-4)


def test_cross_entropy_of_very_unlikely_tokens(build):
    """Where the probability itself would be rounded to nothing."""
    hidden, table = torch.full((3, 16), 10.0), torch.zeros(5000, 16)
    table[7] = 10.0
    found = losses_and_gradients(hidden, table, torch.tensor([7, 0, 4999]), torch.ones(3).bool(), True, True)
    torch.testing.assert_close(found[0], torch.tensor([0.0, 1600.0, 1600.0]))
    assert found[2].isfinite().all()


def test_the_same_bits_again(build):
    """Training goes on bit for bit where it stopped: sums must not depend on which thread was first."""
    hidden, table = (x.detach() for x in tensors((600, 32), (9001, 32)))
    targets, counts = torch.randint(9001, (600,)), torch.ones(600).bool()
    first, second = (losses_and_gradients(hidden, table, targets, counts, True, True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("system", ["slide-plus", "rec-fixed-skip", "feedback-lstm-single", "memorizing"])
def test_a_model_without_kernels_gives_the_same(system, detached):
    """Also the way of those who have no compiler. Over two segments, with gradients through the memory and without."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(system, "micro", vocab_size=5000, memory_neighbors=64)).eval()
    tokens = torch.randint(5000, (2, 129))

    def run():
        model.zero_grad()
        first = model.loss(tokens[:, :64], tokens[:, 1:65])
        second = model.loss(tokens[:, 64:-1], tokens[:, 65:], first.memory.detach() if detached else first.memory)
        (first.sum + second.sum).backward()
        return torch.cat([first.per_token, second.per_token]), [p.grad for p in model.parameters()]

    with_kernels = run()
    with backend("reference"):
        without = run()
    torch.testing.assert_close(with_kernels[0], without[0], atol=1e-4, rtol=1e-5)
    for one, other in zip(with_kernels[1], without[1], strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


def test_what_does_not_fit_never_reaches_c(build):
    q, k, v, bias = tensors((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16), (2, 4))
    seed = torch.zeros(1, dtype=torch.int64)
    padded = torch.nn.functional.pad(bias, (32, 32))
    wrong = [
        (q, k[:, :, 1:], v, padded),  # too few keys
        (q, k[:, :1], v, padded),  # too few heads
        (q, k.double(), v, padded),
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, padded),  # rows that are not contiguous
        (q, k, v, padded[:1]),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="a C kernel was given"):
            torch.ops.brt.window_attention(*(x.detach() for x in given), seed, 0.0, 0)
    targets = torch.tensor([0, 7])
    with pytest.raises(ValueError, match="targets from 0 to 7 for 7 rows"):
        losses_and_gradients(torch.zeros(2, 16), torch.zeros(7, 16), targets, torch.ones(2), False, False)
    scores = torch.zeros(1, 2, 5, 3)
    for slot in (-1, 9, 2**40):
        slots = torch.full((1, 2, 5, 3), slot)
        for operator, more in ((torch.ops.brt.knn_attend, []), (torch.ops.brt.knn_attend_backward, [q])):
            with pytest.raises(ValueError, match=f"slots from {slot} to {slot} of 9 entries"):
                operator(q.detach(), k.detach(), v.detach(), scores, slots, *(x.detach() for x in more))


def every_differentiable_kernel():
    """By name: a function of tensors, and these."""
    seed, counts = torch.zeros(1, dtype=torch.int64), torch.ones(5)
    q, rows, scores = (1, 2, 5, 16), (1, 2, 9, 16), torch.randn(1, 2, 5, 3)
    slots = torch.zeros(1, 2, 5, 3, dtype=torch.int64)
    weights = (16,), (8, 16), (128, 16), (6,)
    ops = torch.ops.brt
    return {
        "window_attention": (cpp_window_attention, tensors(q, rows, rows, (2, 4))),
        "attend": (lambda q, k, v: ops.attend(q, [k], [v], seed, 0.0)[0], tensors(q, rows, rows)),
        "norm": (lambda x, weight: ops.norm(x, weight, 0.5, EPSILON), tensors(q, (2, 16))),
        "unit_heads": (lambda x, weight: ops.unit_heads(x, weight, EPSILON)[1], tensors((1, 6, 5, 16), (4, 16))),
        "cross_entropy": (
            lambda x, table: ops.cross_entropy(x, table, torch.arange(5), counts, True, True)[0],
            tensors((5, 16), (7, 16)),
        ),
        "knn_attend": (lambda q, k, v: ops.knn_attend(q, k, v, scores, slots), tensors(q, rows, rows)),
        "state_step": (
            lambda state, *own: ops.state_step(state, *own[:4], [own[4]], [own[5]], EPSILON)[0],
            tensors((1, 8, 16), *weights, rows, rows),
        ),
        "state_scan": (
            lambda *given: ops.state_scan(*given, 2, EPSILON)[0],
            tensors((1, 8, 16), *weights, (16, 64), (16,), (16,), (1, 2, 12, 16), (1, 2, 12, 16)),
        ),
    }


@pytest.mark.parametrize("name", every_differentiable_kernel())
@pytest.mark.parametrize("linear", [True, False])
def test_second_order_gradients_are_refused(build, name, linear):
    """Also of a plain sum, where the incoming gradient is constant; torch's decorator would not notice that."""
    kernel, given = every_differentiable_kernel()[name]
    out = kernel(*given)
    total = out.sum() if linear else out.square().sum()
    (first,) = torch.autograd.grad(total, given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(first.square().sum() + given[0].square().sum(), given[0])


def test_an_older_build_serves_where_the_newer_one_is_missing(monkeypatch):
    found = cpp.importlib.util.find_spec("block_recurrent.ops.cpp._avx2")
    if found is None:
        pytest.skip("the AVX2 build is not installed")
    monkeypatch.setattr(cpp.importlib.util, "find_spec", lambda name: found if name.endswith("_avx2") else None)
    assert cpp.load("AVX512") is not None


@pytest.mark.parametrize(
    "name", ["window_attention", "attend", "norm", "unit_heads", "cross_entropy", "knn_search", "knn_attend"]
)
def test_operators_are_registered_as_torch_wants_them(build, name):
    """Schema, fake implementation and gradient agree with what the kernel does."""
    q, k, v, bias, table = tensors((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16), (2, 4 + 64), (7, 16))
    visible, seed = torch.ones(1, 9).bool(), torch.zeros(1, dtype=torch.int64)
    fixed_k, fixed_v = k.detach(), v.detach()
    scores, slots = search(q.detach(), fixed_k, visible, 3)
    arguments = {
        "window_attention": (q, k, v, bias, seed, 0.0, 0),
        "attend": (q, [k], [v], seed, 0.0),
        "norm": (q, table[:2].detach().requires_grad_(), 0.5, EPSILON),
        "unit_heads": (
            torch.cat([q, q, q], dim=1).detach().requires_grad_(),
            table[:4].detach().requires_grad_(),
            EPSILON,
        ),
        "cross_entropy": (q[0, 0].detach(), table.detach(), torch.arange(5), torch.ones(5), True, True),
        "knn_search": (q.detach(), fixed_k, visible, 3),
        "knn_attend": (q, fixed_k, fixed_v, scores, slots),
    }[name]
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.brt, name).default, arguments, test_utils=utilities)

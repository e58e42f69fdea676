"""Attention of blocks over keys of their own, and the step of the state: the kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.errors import ConfigError
from block_recurrent.ops import StateWeights, attend, attend_each, backend, cpp, registry
from block_recurrent.ops.attention import state_step
from block_recurrent.ops.cpp.attention import cpp_attend
from block_recurrent.ops.cpp.states import cpp_state_step
from block_recurrent.ops.norm import EPSILON
from block_recurrent.runtime import pick_dtype

CAPABILITY = torch.backends.cpu.get_cpu_capability()
OLDER = {"AVX512": ["AVX512", "AVX2"], "AVX2": ["AVX2"]}


@pytest.fixture(params=OLDER.get(CAPABILITY, ["none"]))
def build(request, monkeypatch):
    """Every build that this processor can run."""
    monkeypatch.setattr(cpp, "LIBRARY", cpp.load(request.param))
    if cpp.LIBRARY is None:
        pytest.skip(f"there are no kernels for {request.param} in this installation (brt doctor)")
    return request.param


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def check(function, reference, given, tolerance=1e-5):
    """All results, and gradients of a random sum of them, beside those of the reference in float64."""
    precise = [x.detach().double().requires_grad_() for x in given]
    found, expected = function(*given), reference(*precise)
    weights = [torch.randn_like(x) for x in found]
    ours = torch.autograd.grad(sum((x * w).sum() for x, w in zip(found, weights, strict=True)), given)
    theirs = torch.autograd.grad(sum((x * w).sum() for x, w in zip(expected, weights, strict=True)), precise)
    for number, (one, other) in enumerate(zip((*found, *ours), (*expected, *theirs), strict=True)):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(
            one.double() / scale, other / scale, atol=tolerance, rtol=0, msg=lambda text, n=number: f"{n}: {text}"
        )


# B, H, blocks, queries of a block, keys of a block, K: nothing that divides anything; also more than 240 keys.
BLOCKS = [(1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 7, 4), (3, 2, 5, 8, 8, 32), (2, 2, 3, 50, 33, 20), (1, 2, 2, 60, 500, 16)]


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_blocks_over_keys_of_their_own(build, shape):
    B, H, T, n, m, K = shape
    q, *rows = tensors((B, T * n, H, K), *2 * T * [(B, H, m, K)])

    def one_by_one(q, *rows):
        parts = zip(q.transpose(1, 2).split(n, dim=2), rows[:T], rows[T:], strict=True)
        return [torch.cat([(part @ k.mT).softmax(-1) @ v for part, k, v in parts], dim=2)]

    check(lambda q, *rows: [cpp_attend(q.transpose(1, 2), rows[:T], rows[T:], 0.0)], one_by_one, [q, *rows])
    with backend("reference"):
        found = attend_each(q.transpose(1, 2), rows[:T], rows[T:])
    torch.testing.assert_close(found, one_by_one(q, *rows)[0], atol=1e-5, rtol=1e-5)


def test_dropout_of_blocks_is_the_same_in_both_passes(build):
    """Values that are rows of a unit matrix show the weights, and so the mask."""
    rate, (q, *keys) = 0.25, tensors((2, 3, 4 * 16, 32), *4 * [(2, 3, 32, 32)])
    values = [torch.eye(32).expand(2, 3, 32, 32).clone() for _ in keys]
    dropped, whole = cpp_attend(q, keys, values, rate), cpp_attend(q, keys, values, 0.0)
    mask = (dropped / whole).detach()
    assert torch.all((mask == 0) | ((mask - 1 / (1 - rate)).abs() < 1e-4))
    assert abs((mask == 0).double().mean().item() - rate) < 4 * (rate * (1 - rate) / mask.numel()) ** 0.5
    weights = torch.randn_like(whole)
    ours = torch.autograd.grad((dropped * weights).sum(), (q, *keys))
    theirs = torch.autograd.grad((whole * mask * weights).sum(), (q, *keys))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


# B, S, D, H, K, W: more and fewer states than tokens, one lane and several.
STEPS = [
    (1, 1, 16, 1, 16, 1),
    (3, 8, 48, 2, 16, 5),
    (2, 33, 32, 3, 32, 20),
    (2, 5, 16, 2, 48, 70),
    (1, 64, 128, 4, 32, 64),
]


def step_inputs(B, S, D, H, K, W):
    return tensors((B, S, D), (D,), (S, D), (4 * H * K, D), (3 * H,), *4 * [(B, H, W, K)])


def by_definition(state, norm, ids, projection, scales, *rows):
    """The recurrent cell in plain steps, with the pair of blocks joined."""
    H, K = len(scales) // 3, rows[0].shape[3]
    x = state * norm / (state.square().mean(-1, keepdim=True) + EPSILON).sqrt() + ids
    values, *others = (x @ projection.T).unflatten(2, (4, H, K)).permute(2, 0, 3, 1, 4)
    parts = zip(others, scales.view(3, H, 1, 1), strict=True)
    keys, own, token = (x * scale / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x, scale in parts)
    tokens = torch.cat(rows[:2], dim=2), torch.cat(rows[2:], dim=2)
    found = [(own @ keys.mT).softmax(-1) @ values, (token @ tokens[0].mT).softmax(-1) @ tokens[1]]
    return torch.cat([x.transpose(1, 2).flatten(2) for x in found], dim=2), keys, values, own, token


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_step_of_the_state(build, shape):
    def in_c(state, *given):
        return cpp_state_step(state, given[:4], given[4:6], given[6:], EPSILON)

    def in_torch(state, *given):
        view, attention = state_step(state, StateWeights(*given[:4]), given[4:6], given[6:])
        return attention, *view

    check(in_c, by_definition, step_inputs(*shape))
    with backend("reference"):
        check(in_torch, by_definition, step_inputs(*shape))


def test_a_step_whose_view_nobody_reads(build):
    """Gradients through the attention alone, and through the keys alone."""
    given = step_inputs(2, 9, 32, 2, 16, 6)
    for part in (0, 1):
        found = cpp_state_step(given[0], given[1:5], given[5:7], given[7:], EPSILON)[part]
        ours = torch.autograd.grad(found.square().sum(), given, allow_unused=True)
        theirs = torch.autograd.grad(by_definition(*given)[part].square().sum(), given, allow_unused=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, atol=1e-3, rtol=1e-4)


def test_a_step_without_gradients(build):
    given = [x.detach() for x in step_inputs(2, 9, 32, 2, 16, 6)]
    found = cpp_state_step(given[0], given[1:5], given[5:7], given[7:], EPSILON)
    for one, other in zip(found, by_definition(*given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_state_step_is_registered_as_torch_wants_it(build):
    given = step_inputs(2, 9, 32, 2, 16, 6)
    arguments = (*given[:5], given[5:7], given[7:], EPSILON)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.brt.state_step.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("system", ["rec-fixed-skip", "rec-lstm-dual", "rec-lstm-single", "feedback-fixed-skip"])
@pytest.mark.parametrize("states", [8, 24])
def test_lanes_that_complete_different_numbers_of_blocks(system, states):
    """A model with the kernels and without: losses, states and every gradient."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(system, "micro", vocab_size=50, window=8, num_states=states, head_dim=16)).eval()
    tokens, lengths = torch.randint(50, (3, 37)), torch.tensor([36, 5, 19])

    def run():
        model.zero_grad()
        first = model.loss(tokens[:, :-1], tokens[:, 1:], lengths=lengths)
        second = model.loss(tokens[:, :-1], tokens[:, 1:], first.memory)
        (first.sum + second.sum).backward()
        states = [layer.state for layer in second.memory.layers if layer.state is not None]
        return [second.per_token, *states], [p.grad for p in model.parameters()]

    found = run()
    with backend("reference"):
        expected = run()
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    for one, other in zip(found[1], expected[1], strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one / scale, other / scale, atol=1e-5, rtol=0)


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
def test_mixed_precision_takes_the_reference():
    sizes = {"width": 128, "head_width": 32, "keys": 64}
    assert registry.select("state_step", torch.empty(1), **sizes, mixed=False) == "cpp"
    assert registry.select("state_step", torch.empty(1), **sizes, mixed=True) == "reference"
    try:
        pick_dtype("bfloat16", torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))  # products in it crash on some virtual machines
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=50, head_dim=16))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.loss(*torch.randint(50, (2, 2, 64))).sum.isfinite()


@pytest.mark.parametrize(
    ("system", "name"), [("slide-plus", None), ("rec-fixed-skip", None), ("rec-fixed-skip", "tiled")]
)
def test_compiled_without_a_graph_break(system, name):
    """A layer with the kernels, forward and backward."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(system, "micro", vocab_size=50, head_dim=16)).eval()
    layer, x = model.layers[1], torch.randn(2, 64, 48, requires_grad=True)

    def run(forward):
        memory, grid = model._enter(torch.zeros(2, 64, dtype=torch.int64), None, None, None)
        out, after = forward(x, memory.layers[1], grid)
        loss = out.square().sum() + (0.0 if after.state is None else after.state.sum())
        return out, *torch.autograd.grad(loss, (x, *layer.parameters()), allow_unused=True)

    with backend(name):
        compiled, plain = run(torch.compile(layer, fullgraph=True, backend="aot_eager")), run(layer)
    for one, other in zip(compiled, plain, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_attend_is_one_block(build):
    q, k, v = tensors((2, 3, 10, 16), (2, 3, 12, 16), (2, 3, 12, 16))
    assert torch.equal(attend(q, k, v), attend_each(q, [k], [v]))

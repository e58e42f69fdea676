"""The state through all blocks of a call: the kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.model.cell import SkipUpdate
from block_recurrent.nn.gates import Candidate, FixedGate
from block_recurrent.ops import Average, StateWeights, backend, cpp, registry, state_scan, stated
from block_recurrent.ops.cpp.scan import cpp_state_scan
from block_recurrent.ops.norm import EPSILON
from tests.ops.test_states import build, by_definition, check, tensors

__all__ = ["build"]  # a fixture

# B, S, D, H, K, W, T: windows that divide nothing, one block, more states than tokens and fewer.
SCANS = [
    (1, 8, 16, 1, 16, 1, 1),
    (3, 24, 32, 2, 16, 5, 3),
    (2, 16, 48, 3, 32, 12, 4),
    (2, 40, 64, 2, 48, 8, 2),
    (5, 8, 128, 4, 32, 40, 2),
]


def inputs(B, S, D, H, K, W, T):
    rows = B, (1 + T) * W, H, K
    weights = (D,), (S, D), (4 * H * K, D), (3 * H,), (D, 2 * H * K), (D,), (D,)
    *given, keys, values = tensors((B, S, D), *weights, rows, rows)
    scale = torch.tensor([1.0, 1.0, 1.0, D**-0.5, 1.0, (2 * H * K) ** -0.5, 1.0, 1.0])
    given = [(x * s).detach().requires_grad_() for x, s in zip(given, scale, strict=True)]
    given[7] = given[7].sigmoid().detach().requires_grad_()  # the share to keep
    return [*given, keys.transpose(1, 2).detach().requires_grad_(), values.transpose(1, 2).detach().requires_grad_()]


def block_by_block(blocks):
    def scan(state, *given):
        *weights, map, bias, keep, keys, values = given
        W = keys.shape[2] // (1 + blocks)
        states, own_keys, own_values = [], [], []
        for block in range(blocks):
            rows = [x[:, :, (block + i) * W : (block + i + 1) * W] for x in (keys, values) for i in range(2)]
            attention, key, value, *_ = by_definition(state, *weights, *rows)
            state = state * keep + (attention @ map.T + bias) * (1 - keep)
            states.append(state)
            own_keys.append(key)
            own_values.append(value)
        return [torch.stack(x) for x in (states, own_keys, own_values)]

    return scan


@pytest.mark.parametrize("shape", SCANS, ids=str)
def test_scan(build, shape):
    blocks = shape[-1]

    def in_c(state, *given):
        return cpp_state_scan(state, given[:7], *given[7:], blocks, EPSILON)

    check(in_c, block_by_block(blocks), inputs(*shape), 2e-5)


@pytest.mark.parametrize("shape", SCANS, ids=str)
def test_scan_of_the_reference_and_of_the_kernel_are_one_function(build, shape):
    blocks = shape[-1]

    def scan(state, *given):
        class Update(nn.Module):
            def average(self):
                return Average(*given[4:7])

            def forward(self, attention, state):
                map, bias, keep = self.average()
                return state * keep + (attention @ map.T + bias) * (1 - keep)

        read, states = state_scan(state, StateWeights(*given[:4]), Update(), *given[7:], blocks)
        return [torch.stack(x) for x in (states[1:], *zip(*read, strict=True))]

    check(scan, block_by_block(blocks), inputs(*shape), 2e-5)
    with backend("reference"):
        check(scan, block_by_block(blocks), inputs(*shape), 2e-5)


@pytest.mark.parametrize("part", range(3))
def test_gradients_through_one_of_the_results(build, part):
    """Training cuts the gradient of the last state; the last block's view may be read by nobody."""
    given = inputs(2, 16, 32, 2, 16, 6, 3)
    ours = torch.autograd.grad(
        cpp_state_scan(given[0], given[1:8], *given[8:], 3, EPSILON)[part].square().sum(), given, allow_unused=True
    )
    theirs = torch.autograd.grad(block_by_block(3)(*given)[part].square().sum(), given, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, atol=2e-3, rtol=1e-4)


def test_a_lane_does_not_depend_on_the_others(build):
    given = [x.detach() for x in inputs(5, 16, 32, 2, 16, 6, 3)]
    together = cpp_state_scan(given[0], given[1:8], *given[8:], 3, EPSILON)
    for lane in range(5):
        own = given[0][lane : lane + 1], given[1:8], given[8][lane : lane + 1], given[9][lane : lane + 1]
        for alone, all_lanes in zip(cpp_state_scan(*own, 3, EPSILON), together, strict=True):
            assert torch.equal(alone[:, 0], all_lanes[:, lane])


def test_the_operator_is_registered_as_torch_wants_it(build):
    given = inputs(2, 16, 32, 2, 16, 6, 3)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.brt.state_scan.default, (*given, 3, EPSILON), test_utils=utilities)


@pytest.mark.parametrize("change", ["state", "ids", "map", "keys"])
def test_wrong_shapes_never_reach_c(build, change):
    given = dict(zip(("state", "norm", "ids", "projection", "scales", "map", "bias", "keep", "keys", "values"),
                     [x.detach() for x in inputs(2, 16, 32, 2, 16, 6, 3)], strict=True))  # fmt: skip
    given[change] = given[change][..., :-1, :].contiguous()
    with pytest.raises(ValueError, match="a C kernel was given"):
        torch.ops.brt.state_scan(*given.values(), 3, EPSILON)


def count_scans(monkeypatch):
    calls = []

    def counting(*arguments):
        calls.append(arguments)
        return cpp_state_scan(*arguments)

    monkeypatch.setattr("block_recurrent.ops.scan.cpp_state_scan", counting)
    return calls


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
@pytest.mark.parametrize(("system", "scans"), [("rec-fixed-skip", 1), ("rec-lstm-skip", 0), ("rec-fixed-dual", 0)])
def test_which_systems_use_it(monkeypatch, system, scans):
    calls = count_scans(monkeypatch)
    model = BlockRecurrentLM(preset(system, "micro", vocab_size=50, window=8, num_states=8, head_dim=16))
    model(torch.randint(50, (2, 32)))
    assert len(calls) == scans


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class HalvedGate(FixedGate):
    def forward(self, h, state):
        return super().forward(h, state) / 2


class HalvedCandidate(Candidate):
    def forward(self, h):
        return super().forward(h) / 2


def hooked(part):
    return part.register_forward_hook(lambda module, args, output: output / 2)


def prehooked(part):
    return part.register_forward_pre_hook(lambda module, args: tuple(x / 2 for x in args))


def replaced(part):
    part.forward = lambda *args, forward=part.forward: forward(*args) / 2


def subclassed(part):
    kinds = {FixedGate: HalvedGate, Candidate: HalvedCandidate, nn.Linear: Halved}
    part.__class__ = kinds[type(part)]


CHANGES = [
    *((kind, change) for kind in (SkipUpdate, FixedGate, Candidate) for change in (hooked, prehooked, replaced)),
    *((kind, subclassed) for kind in (FixedGate, Candidate, nn.Linear)),
]


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_a_changed_part_of_the_update_is_called(monkeypatch, kind, change):
    """Whatever a user changes in an update has the effect that it has without the kernel."""
    calls = count_scans(monkeypatch)
    model = BlockRecurrentLM(
        preset("rec-fixed-skip", "micro", vocab_size=50, window=8, num_states=8, head_dim=16, gate_bias=False)
    ).eval()
    tokens = torch.randint(50, (2, 32))
    unchanged = model(tokens)[0]
    [update] = (module for module in model.modules() if isinstance(module, SkipUpdate))
    change(next(part for part in update.modules() if type(part) is kind))
    changed = model(tokens)[0]
    assert len(calls) == 1, "only of the model as it was"
    with backend("reference"):
        expected = model(tokens)[0]
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(changed, unchanged, atol=1e-3)


def test_gradient_hooks_are_called():
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", vocab_size=50, window=8, num_states=8, head_dim=16))
    gate, seen = next(x for x in model.modules() if isinstance(x, FixedGate)), []
    gate.register_full_backward_hook(lambda *_: seen.append(1))
    tokens = torch.randint(50, (2, 32))
    model.loss(tokens, tokens).sum.backward()
    assert seen


def test_a_gate_is_the_average_that_it_states():
    assert stated(HalvedGate(32, 16, True, False), "average") is None
    assert stated(FixedGate(32, 16, True, True), "average") is None
    gate = FixedGate(32, 16, False, False)
    average = stated(gate, "average")
    assert average is not None
    assert not average.bias.any()
    h, state = torch.randn(2, 3, 32), torch.randn(2, 3, 16)
    expected = state * average.keep + nn.functional.linear(h, average.map, average.bias) * (1 - average.keep)
    torch.testing.assert_close(gate(h, state), expected)


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
def test_the_table():
    x = torch.empty(1)
    assert registry.select("state_scan", x, width=128, keys=64, mixed=False) == "cpp"
    assert registry.select("state_scan", x, width=1024, keys=64, mixed=False) == "reference"
    assert registry.select("state_scan", x, width=128, keys=64, mixed=True) == "reference"
    assert registry.select("state_scan", x, width=128, keys=1024, mixed=False) == "reference"

"""Adafactor against optax's trajectories, and its rules on shapes that the golden file does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from block_recurrent import BlockRecurrentLM, preset
from block_recurrent.run_config import OptimizerConfig
from block_recurrent.train.muon import UPDATE_RMS, orthogonalised
from block_recurrent.train.optimizer import Adafactor, linear_maps, make_optimizer, set_rate

GOLDEN = Path(__file__).parent.parent / "golden" / "adafactor.safetensors"
NAMES = ("factored", "matrix", "vector", "zeros")


@pytest.mark.parametrize(("kind", "momentum"), [("momentum", 0.9), ("plain", 0.0)])
def test_follows_optax(kind: str, momentum: float) -> None:
    golden = load_file(GOLDEN)
    params = {name: nn.Parameter(golden[f"param/0/{name}"].clone()) for name in NAMES}
    optimizer = Adafactor(params.values(), lr=0.0, momentum=momentum)
    for t, rate in enumerate(golden["learning_rate"].tolist()):
        optimizer.param_groups[0]["lr"] = rate
        for name, p in params.items():
            p.grad = golden[f"{kind}/grad/{t}/{name}"].clone()
        optimizer.step()
        for name, p in params.items():
            expected = golden[f"{kind}/param/{t + 1}/{name}"]
            assert (p.detach() - expected).abs().max() <= 1e-5 * expected.abs().max(), (name, t)


def _plain(shape: tuple[int, ...], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter after some steps of ours, and of the same update written out in float64."""
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(shape))
    x, m = p.detach().double(), torch.zeros(shape, dtype=torch.float64)
    order = sorted(range(len(shape)), key=lambda d: shape[d])
    factored = len(shape) > 1 and shape[order[-2]] >= 128
    second_moment = torch.zeros(shape, dtype=torch.float64)
    row = col = torch.tensor(0.0, dtype=torch.float64)
    optimizer = Adafactor([p], lr=0.02)
    for t in range(1, steps + 1):
        p.grad = torch.randn(shape)
        g, decay = p.grad.double(), 1 - t**-0.8
        if factored:
            row = decay * row + (1 - decay) * (g**2 + 1e-30).mean(order[-1], keepdim=True)
            col = decay * col + (1 - decay) * (g**2 + 1e-30).mean(order[-2], keepdim=True)
            v = row * col / row.mean(order[-2], keepdim=True)
        else:
            v = second_moment = decay * second_moment + (1 - decay) * (g**2 + 1e-30)
        u = g / v.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        u = u * 0.02 * max(x.square().mean().sqrt().item(), 1e-3)
        m = 0.9 * m + 0.1 * u
        x = x - m
        optimizer.step()
    return p.detach().double(), x


@pytest.mark.parametrize(
    "shape", [(), (5,), (130, 127), (128, 128), (200, 130), (130, 200), (3, 140, 150), (140, 2, 150)]
)
def test_any_shape(shape: tuple[int, ...]) -> None:
    ours, expected = _plain(shape, steps=4)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_is_a_gradient_of_zero() -> None:
    with_none, with_zero = (nn.Parameter(torch.ones(4)) for _ in range(2))
    for p in (with_none, with_zero):
        optimizer = Adafactor([p], lr=0.1)
        for t in range(3):
            p.grad = torch.ones(4) if t == 0 else None if p is with_none else torch.zeros(4)
            optimizer.step()
    assert torch.equal(with_none, with_zero)
    assert not torch.equal(with_none, torch.ones(4))


def test_adamw_decays_matrices_only() -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimizerConfig(name="adamw", weight_decay=0.5))
    decay = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {2: 0.5, 1: 0.0}
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * 0.95)


@pytest.mark.parametrize(
    ("system", "fast"), [("rec-fixed-skip", 1), ("rec-fixed-dual", 2), ("rec-lstm-dual", 4), ("slide", 0)]
)
def test_gate_biases_have_a_rate_of_their_own(system: str, fast: int) -> None:
    model = BlockRecurrentLM(preset(system, "micro", 257))
    optimizer = make_optimizer(model, OptimizerConfig(name="adamw", gate_rate=7.0))
    set_rate(optimizer, 0.01)
    sizes = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
    assert sum(count for rate, count in sizes if rate == pytest.approx(0.07)) == fast
    assert sum(count for _, count in sizes) == len(list(model.parameters()))


def test_muon_updates_the_maps_and_adamw_the_rest() -> None:
    model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", 50))
    optimizer = make_optimizer(model, OptimizerConfig(name="muon"))
    maps = {id(p) for p in linear_maps(model)}
    by_muon = {id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert by_muon == maps
    assert id(model.embedding.weight) not in maps
    assert len(everything) == len(list(model.parameters()))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randint(0, 50, (2, 64))
    model.loss(x, x).sum.backward()
    set_rate(optimizer, 0.01)
    optimizer.step()
    for name, p in model.named_parameters():
        change = p.detach() - before[name]
        assert change.abs().max() > 0, name
        if id(p) in maps:  # the length of an update does not depend on that of the gradient
            values = torch.linalg.svdvals(change) / (0.01 * UPDATE_RMS * max(p.shape) ** 0.5)
            assert 0.6 < values.max() < 1.3, name


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 5, 5)])
def test_orthogonalised_keeps_the_singular_vectors(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(orthogonalised(x), full_matrices=False)
    want_u, _, want_v = torch.linalg.svd(x, full_matrices=False)
    assert torch.allclose(u @ v, want_u @ want_v, atol=1e-3)


@pytest.mark.parametrize("name", ["adafactor", "adamw", "muon"])
def test_a_closure_computes_the_gradients(name: str) -> None:
    """As Lightning calls an optimizer."""
    x = torch.arange(64)[None] % 50
    after = []
    for with_closure in (False, True):
        torch.manual_seed(0)
        model = BlockRecurrentLM(preset("rec-fixed-skip", "micro", 50)).eval()
        optimizer = make_optimizer(model, OptimizerConfig(name=name))
        set_rate(optimizer, 0.01)

        def closure(model: BlockRecurrentLM = model) -> torch.Tensor:
            loss = model.loss(x, x).sum
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            assert optimizer.step() is None
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*after)

"""Initial values, by their moments, on enough numbers to tell."""

from __future__ import annotations

import math

import pytest
import torch

from block_recurrent import BlockRecurrentLM, ModelConfig

D, H, K, F, S, V = 160, 8, 24, 320, 300, 900
WIDE = {"d_model": D, "num_heads": H, "head_dim": K, "mlp_dim": F, "num_states": S, "vocab_size": V} | {
    "num_layers": 3,
    "window": 8,
    "segment": 8,
}


@pytest.fixture(scope="module")
def models() -> list[BlockRecurrentLM]:
    """Together they have every kind of parameter."""
    torch.manual_seed(0)
    kinds = [
        {"recurrent_layers": (2,), "gate": "fixed", "gate_config": "dual"},
        {"recurrent_layers": (2,), "gate": "lstm", "gate_config": "dual"},
        {"recurrent_layers": (2,), "gate": "lstm", "gate_config": "single", "feedback": True},
        {"memory_layers": (2,), "memory_size": 16, "memory_neighbors": 4},
    ]
    return [BlockRecurrentLM(ModelConfig(**WIDE, **kind)) for kind in kinds]


def parameters(models, *endings):
    found = [(name, p.detach()) for model in models for name, p in model.named_parameters() if name.endswith(endings)]
    assert found
    return found


def assert_moments(x: torch.Tensor, deviation: float, name: str):
    """Mean and deviation within five standard errors of what they should be."""
    n = x.numel()
    assert x.mean().abs() < 5 * deviation / math.sqrt(n), name
    assert x.std(unbiased=False).item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * n)), name


def test_linear_maps(models):
    """Cut at two deviations, and of variance 1 / fan_in after that: no weight is beyond 2.27 / sqrt(fan_in)."""
    gates = ("input.weight", "forget.weight")
    for name, weight in parameters(models, ".weight"):
        if weight.ndim == 1 or name == "embedding.weight":
            continue
        variance = 0.1 if name.endswith(gates) else 1.0
        deviation = math.sqrt(variance / weight.shape[1])
        assert_moments(weight, deviation, name)
        limit = 2 * deviation / 0.87962566
        assert 0.97 * limit < weight.abs().max() <= limit * 1.0001, name


def test_fan_in_is_what_enters(models):
    shapes = {name: tuple(x.shape) for name, x in parameters(models[:1], ".weight")}
    assert shapes["layers.1.to_keys.weight"] == (H * K, D)
    assert shapes["layers.0.project.weight"] == (D, H * K)
    assert shapes["layers.1.project.weight"] == (D, 2 * H * K)
    assert shapes["layers.1.mlp.output.weight"] == (D, F)
    assert shapes["layers.1.cell.update.attention_gate.candidate.map.weight"] == (D, 2 * H * K)


@pytest.mark.parametrize(
    ("ending", "deviation"),
    [
        ("gate.input_bias", 0.1),
        ("gate.forget_bias", 0.1),
        ("gate.bias", 0.1),
        ("candidate.bias", 0.1),
        ("initial_state", 0.1),
        ("state_ids", 1.0),
        ("embedding.weight", 1.0),
        ("position_bias.table", math.sqrt(1 / 32)),
    ],
)
def test_normal_values(models, ending, deviation):
    found = parameters(models, ending)
    assert_moments(torch.cat([x.flatten() for _, x in found]), deviation, ending)
    for name, x in found:
        assert x.abs().max() > 2 * deviation, f"{name} is cut"


def test_scales_are_one_and_the_mix_is_zero(models):
    for name, x in parameters(models, "norm.weight", "scale"):
        assert torch.equal(x, torch.ones_like(x)), name
    for name, x in parameters(models, "recall_mix"):
        assert torch.equal(x, torch.zeros(H)), name


def test_every_parameter_is_covered_by_these_tests(models):
    known = ("weight", "gate.input_bias", "gate.forget_bias", "gate.bias", "candidate.bias", "initial_state")
    known += ("state_ids", "position_bias.table", "scale", "recall_mix")
    assert [name for model in models for name, _ in model.named_parameters() if not name.endswith(known)] == []


def test_keys_values_and_queries_are_parameters_of_their_own(models):
    """Adafactor works per tensor, so nothing is fused."""
    names = {name for name, _ in models[0].named_parameters()}
    side = {"layers.1.to_keys", "layers.1.to_values", "layers.1.to_queries", "layers.1.to_state_queries"}
    cell = {f"layers.1.cell.to_{what}" for what in ("keys", "values", "self_queries", "token_queries")}
    assert {f"{name}.weight" for name in side | cell} <= names


def test_the_seed_decides(make_model):
    config = ModelConfig(**WIDE)
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(BlockRecurrentLM(config))
    assert torch.equal(models[0].layers[0].to_keys.weight, models[1].layers[0].to_keys.weight)
    assert not torch.equal(models[0].layers[0].to_keys.weight, models[2].layers[0].to_keys.weight)


def test_logits_of_a_new_model_are_of_size_one():
    """Embeddings of deviation 1, tied, over sqrt(D): a new model's loss is not far above log V."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(ModelConfig(**WIDE)).eval()
    logits, _ = model(torch.randint(V, (1, 64)))
    assert logits.std().item() == pytest.approx(1.0, rel=0.2)

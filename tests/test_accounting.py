"""Costs worked out on paper equal what the real model and memory have."""

from __future__ import annotations

import json

import pytest
import torch

from block_recurrent import BlockRecurrentLM, DocumentMemory, preset
from block_recurrent.accounting import cost_of
from block_recurrent.cli.main import main
from block_recurrent.presets import SIZES, SYSTEMS, preset_lanes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_parameters_and_memory_are_those_of_the_model(system: str, size: str) -> None:
    config = preset(system, size, vocab_size=1000)
    with torch.device("meta"):
        model = BlockRecurrentLM(config)
        memory = DocumentMemory.empty(config, 1, device="meta")
    cost = cost_of(config)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.non_embedding_parameters == cost.parameters - model.embedding.weight.numel()
    assert cost.memory_bytes == memory.nbytes


@pytest.mark.parametrize(("gate_bias", "gate_tanh"), [(False, True), (True, False)])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name.startswith("rec-")])
def test_the_authors_variants_are_counted_too(system: str, gate_bias: bool, gate_tanh: bool) -> None:
    config = preset(system, "micro", gate_bias=gate_bias, gate_tanh=gate_tanh)
    assert cost_of(config).parameters == sum(p.numel() for p in BlockRecurrentLM(config).parameters())


def test_the_papers_counts() -> None:
    assert cost_of(preset("slide", "160m")).non_embedding_parameters == pytest.approx(151e6, rel=0.002)
    assert cost_of(preset("slide-plus", "160m")).non_embedding_parameters == pytest.approx(164e6, rel=0.003)


def test_flops_by_hand() -> None:
    """slide at 160m, per token: 12 layers of 4 D*HK + 2 D*F weights and 512 keys, and the logits; times 2 and 3."""
    layer = 2 * (4 * 1024 * 1024 + 2 * 1024 * 4096) + 4 * 1024 * 512
    assert cost_of(preset("slide", "160m")).flops_per_token == 3 * (12 * layer + 2 * 1024 * 32000)


def test_recurrence_costs_what_a_layer_costs() -> None:
    recurrent, deeper = (cost_of(preset(name, "160m")).flops_per_token for name in ("rec-fixed-skip", "slide-plus"))
    assert recurrent / deeper == pytest.approx(0.995, abs=5e-4)


@pytest.mark.parametrize("size", SIZES)
def test_every_system_sees_the_same_tokens_a_step(size: str) -> None:
    assert len({preset_lanes(system, size) * preset(system, size).segment for system in SYSTEMS}) == 1


def test_presets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json", "--vocab-size", "1000"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 15 * 9
    keys = {"system", "size", "parameters", "non_embedding_parameters", "flops_per_token", "memory_bytes"}
    assert all(set(row) == keys for row in rows)
    assert rows[0]["parameters"] == cost_of(preset(rows[0]["system"], rows[0]["size"], 1000)).parameters


def test_presets_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--size", "160m", "--system", "slide"]) == 0
    printed = capsys.readouterr().out
    assert "151M" in printed
    assert "48.0 MiB" in printed

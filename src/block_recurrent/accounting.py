"""The cost of a model, computed from its configuration: parameters, training FLOPs, bytes of memory. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError

BACKWARD_AND_FORWARD = 3
"""A training step costs three forward passes: the backward pass has two products for each one of the forward pass."""
BYTES = 4  # of a float32 number


@dataclass(frozen=True)
class Cost:
    """The columns of `brt presets`."""

    parameters: int  # all weights, counting the embedding (which is also the output) once
    non_embedding_parameters: int
    flops_per_token: float
    """FLOPs of a training step: dense products, the logits, and attention to the W keys that a query may see."""
    memory_bytes: int  # of one lane's `DocumentMemory` in float32


def cost_of(config: ModelConfig) -> Cost:
    """Parameters, FLOPs and memory of a model."""
    layers = range(1, config.num_layers + 1)
    inner = sum(_layer_parameters(config, number) for number in layers) + config.d_model
    embedding = config.vocab_size * config.d_model
    flops = BACKWARD_AND_FORWARD * 2 * embedding + sum(_layer_flops(config, number) for number in layers)
    return Cost(embedding + inner, inner, flops, sum(_layer_memory(config, number) for number in layers))


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_weights_fit(config: ModelConfig) -> None:
    """Raise an error before anything is allocated, if this machine can't hold the weights."""
    if (weights := BYTES * cost_of(config).parameters) > (there := machine_memory()):
        raise ConfigError(
            f"the weights alone need {weights / 2**30:,.0f} GiB, but this machine has {there / 2**30:,.0f} GiB: choose "
            "a smaller --size, or lower model.d_model or model.vocab_size"
        )


def _heads_width(config: ModelConfig) -> int:
    return config.num_heads * config.head_dim


def _token_maps(config: ModelConfig, number: int) -> int:
    """Entries of the matrices that every token is multiplied with."""
    D, HK, reads = config.d_model, _heads_width(config), config.layer_reads_state(number)
    projections = (4 if reads else 3) * D * HK
    return projections + (2 if reads else 1) * HK * D + 2 * D * config.mlp_dim


def _state_maps(config: ModelConfig) -> int:
    """Entries of the matrices that every state vector is multiplied with, once per block."""
    D, HK, F = config.d_model, _heads_width(config), config.mlp_dim
    maps_in_gate = 1 if config.gate == "fixed" else 3
    attention_gate, mlp_gate = maps_in_gate * 2 * HK * D, maps_in_gate * F * D
    update = {
        "skip": attention_gate,
        "single": 2 * HK * F + mlp_gate,
        "dual": attention_gate + D * F + mlp_gate,
    }.get(config.gate_config, attention_gate)  # a custom update: as for skip
    return 4 * D * HK + update


def _layer_parameters(config: ModelConfig, number: int) -> int:
    D, H = config.d_model, config.num_heads
    count = _token_maps(config, number) + 2 * D + H  # two norms, the attention scale
    count += H if number in config.memory_layers else 32 * H  # the mixing scalar, or the position bias
    count += H if config.layer_reads_state(number) else 0
    if number in config.recurrent_layers:
        biases_in_gate = (1 if config.gate == "fixed" else 2) + config.has_gate_bias
        gates = 2 if config.gate_config == "dual" else 1
        count += _state_maps(config) + gates * biases_in_gate * D + 2 * config.num_states * D + D + 2 * H
        count += D if config.gate_config == "dual" else 0
    return count


def _layer_flops(config: ModelConfig, number: int) -> float:
    """FLOPs of a training step, per token."""
    HK, W, S = _heads_width(config), config.window, config.num_states
    per_key = 4 * HK  # one product for the logit, one for the value
    forward: float = 2 * _token_maps(config, number) + per_key * W
    if config.layer_reads_state(number):
        forward += per_key * S
    if number in config.recurrent_layers:
        forward += (2 * _state_maps(config) + per_key * (S + 2 * W)) * S / W
    if number in config.memory_layers:
        forward += per_key * config.memory_neighbors
    flops = BACKWARD_AND_FORWARD * forward
    if number in config.memory_layers:
        flops += 2 * HK * config.memory_size  # the search has no backward pass
    return flops


def _layer_memory(config: ModelConfig, number: int) -> int:
    recurrent = number in config.recurrent_layers
    cached = 2 * config.window if recurrent else config.window
    knn_entries = config.memory_size if number in config.memory_layers else 0
    states = config.num_states * config.d_model if recurrent else 0
    return BYTES * (2 * (cached + knn_entries) * _heads_width(config) + states)

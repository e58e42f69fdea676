"""`--dry-run`: what a run would be and cost, and one step of it, without touching a folder."""

from __future__ import annotations

import resource
import sys
import time

from torch import Tensor

from block_recurrent import runtime as rt
from block_recurrent.accounting import cost_of
from block_recurrent.data import Corpus
from block_recurrent.run_config import RunConfig
from block_recurrent.train.loop import Trainer, settle

FLOAT32 = 4


def dry_run(config: RunConfig) -> None:
    """Print the resolved configuration, parameters by group and estimated memory; make one update and throw it away."""
    with rt.start(config.train.device, config.train.dtype) as runtime:
        corpus = Corpus(config.data.path)
        config = settle(config, corpus, runtime)
        trainer = Trainer(config, corpus, runtime)
        if runtime.is_main:
            print(config.to_toml())
            _print_table("parameters", parameter_groups(trainer), "{:>15,}")
            _print_table("estimated memory of one process", estimated_memory(trainer), "{:>12,.1f} MiB", 2**20)
        with trainer.stream:
            began = time.perf_counter()
            update, _ = trainer.updater.update(
                1, [next(trainer.stream) for _ in range(config.train.bptt)], trainer.snapshot.memories
            )
            seconds = time.perf_counter() - began
        if runtime.is_main:
            print(
                f"one step: {update.bits_per_token:.3f} bits per token, {update.text_tokens} tokens in {seconds:.2f} s"
            )
            print(f"peak of the whole process: {peak_bytes() / 2**20:,.0f} MiB; nothing was written")


def parameter_groups(trainer: Trainer) -> dict[str, int]:
    """Parameters by what they are for."""
    groups: dict[str, int] = {}
    for name, p in trainer.snapshot.model.named_parameters():
        group = _group(name)
        groups[group] = groups.get(group, 0) + p.numel()
    return groups


def _group(name: str) -> str:
    if name.startswith("embedding"):
        return "embedding"
    for part, group in ((".cell.", "recurrent cell"), ("norm", "norms"), (".mlp.", "MLP")):
        if part in name:
            return group
    return "attention"


def estimated_memory(trainer: Trainer) -> dict[str, float]:
    """Bytes on one process: exact but for activations, which are a sum over what the backward pass needs."""
    config, world = trainer.config, trainer.runtime.world
    shards = world if config.train.parallel == "fsdp" else 1
    model = trainer.snapshot.model
    weights = FLOAT32 * sum(p.numel() for p in model.parameters())
    states = [x for state in trainer.snapshot.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    lanes = config.train.lanes // world
    return {
        "weights": weights / shards,
        "gradients": weights / shards,
        "optimizer": sum(x.numel() * x.element_size() for x in states) / shards,
        "memory of all lanes": lanes * cost_of(config.model).memory_bytes,
        "activations": activation_bytes(config) * lanes / config.train.accumulate,
    }


def activation_bytes(config: RunConfig) -> float:
    """Per lane, what the backward pass of an update needs: within 10% of what autograd keeps at our own sizes."""
    model = config.model
    D, HK, F, W, S = model.d_model, model.num_heads * model.head_dim, model.mlp_dim, model.window, model.num_states
    size = 2 if config.train.dtype == "bfloat16" else FLOAT32
    layer = 6 * D * FLOAT32 + (6 * HK + F + model.num_heads * W) * size
    reading = (3 * HK + 2 * model.num_heads * S) * size
    hidden = 0 if model.gate_config == "skip" else 2 * F
    cell = 8 * D * FLOAT32 + (12 * HK + hidden + model.num_heads * (S + 2 * W)) * size
    readers = sum(model.layer_reads_state(number) for number in range(1, model.num_layers + 1))
    per_token = model.num_layers * layer + readers * reading + len(model.recurrent_layers) * cell * S / W
    if config.train.checkpoint_activations:
        largest = layer + (reading + cell * S / W if model.recurrent_layers else 0)
        per_token = model.num_layers * D * FLOAT32 + largest
    return per_token * model.segment * config.train.bptt


def peak_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_table(title: str, rows: dict[str, int] | dict[str, float], form: str, unit: float = 1) -> None:
    print(f"{title}:")
    for name, value in [*rows.items(), ("all", sum(rows.values()))]:
        print(f"  {name:22}{form.format(value / unit if unit != 1 else value)}")
    print()

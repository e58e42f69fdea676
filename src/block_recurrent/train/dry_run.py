"""`--dry-run`: print what a run would cost and run one step, without writing any files."""

from __future__ import annotations

import resource
import sys
import time

from torch import Tensor

from block_recurrent import runtime as rt
from block_recurrent.accounting import cost_of
from block_recurrent.io.output import print_table
from block_recurrent.run_config import RunConfig
from block_recurrent.train.loop import Trainer
from block_recurrent.train.meta import saved_bytes

FLOAT32 = 4


def dry_run(config: RunConfig) -> None:
    """Print the resolved configuration, parameters by group and estimated memory; run one update and discard it."""
    with rt.start(*config.train.place) as runtime:
        trainer = Trainer(config, runtime)
        if runtime.is_main:
            print(trainer.config.to_toml())
            _print_table("parameters", parameter_groups(trainer), "{:,}")
            _print_table("estimated memory of one process", estimated_memory(trainer), "{:,.1f} MiB", 2**20)
        with trainer.stream:
            began = time.perf_counter()
            update = trainer.update(1, trainer.next_segments())
            seconds = time.perf_counter() - began
        if runtime.is_main:
            print(
                f"one step: {update.bits_per_token:.3f} bits per token, {update.text_tokens} tokens in {seconds:.2f} s"
            )
            print(f"peak memory of the process: {peak_bytes() / 2**20:,.0f} MiB; nothing was written")


def parameter_groups(trainer: Trainer) -> dict[str, int]:
    """Parameters by component."""
    groups: dict[str, int] = {}
    for name, p in trainer.state.model.named_parameters():
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
    """Bytes on one process: exact except for activations, which are extrapolated from one lane."""
    config, world = trainer.config, trainer.runtime.world
    shards = world if config.train.parallel == "fsdp" else 1
    model = trainer.state.model
    weights = FLOAT32 * sum(p.numel() for p in model.parameters())
    states = [x for state in trainer.state.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    lanes = config.train.lanes // world
    rows = {
        "weights": weights / shards,
        "gradients": weights / shards,
        "optimizer": sum(x.numel() * x.element_size() for x in states) / shards,
        "memory of all lanes": lanes * cost_of(config.model).memory_bytes,
        "activations": activation_bytes(config, trainer.runtime, lanes // config.train.accumulate),
    }
    if shards > 1 and (config.train.keep_gathered or config.model.feedback):
        rows["gathered weights"] = weights / FLOAT32 * trainer.runtime.dtype.itemsize
    return rows


def activation_bytes(config: RunConfig, runtime: rt.Runtime, lanes: int) -> int:
    """Bytes saved for the backward pass of an update, counted with the kernels that would run.

    With `train.checkpoint_activations` these are the inputs of the layers, plus one recomputed layer.
    """

    def kept(lanes: int) -> int:
        layers, others = saved_bytes(config.model, runtime, lanes)
        inputs = lanes * len(layers) * config.model.d_model * FLOAT32 * config.model.segment
        held = inputs + max(layers) if config.train.checkpoint_activations else sum(layers)
        return (held + others) * config.train.bptt

    # Some of it, such as concatenated weights, does not depend on the number of lanes.
    one = kept(1)
    return one if lanes == 1 else one + (kept(2) - one) * (lanes - 1)


def peak_bytes() -> int:
    """Peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_table(title: str, rows: dict[str, int] | dict[str, float], form: str, unit: int = 1) -> None:
    shown = [(name, form.format(value / unit if unit > 1 else value)) for name, value in rows.items()]
    print_table(
        [title, ""], [*shown, ("all", form.format(sum(rows.values()) / unit if unit > 1 else sum(rows.values())))]
    )
    print()

"""`brt bench steptime`: a training step of every system, compared with slide-plus and with peak GEMM throughput."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from block_recurrent.accounting import cost_of
from block_recurrent.bench.harness import best_seconds, chosen, make_room, peak_bytes_of
from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError
from block_recurrent.presets import SIZES, SYSTEMS, preset, preset_lanes
from block_recurrent.run_config import OptimizerConfig, default_optimizer, parse_settings

if TYPE_CHECKING:
    from torch import Tensor

    from block_recurrent.model.memory import DocumentMemory

    Weights = dict[tuple[str, tuple[int, ...]], Tensor]

SUMMARY = "time of a training step of each system"
EXAMPLE = "brt bench steptime --size tiny --systems slide-plus,rec-fixed-skip"
NOTE = (
    "seconds: forward and backward on random tokens with the memory carried, without dropout unless --dropout, best of "
    "the repeats, all systems in turns; with the update of the size's optimizer up to size small. The "
    "memory that memorizing searches is full from the start. relative: to slide-plus. flop_ratio: "
    "its useful FLOPs over slide-plus's. paper: the paper's step time over Slide:13L's. limit_share: useful FLOPs "
    "(attention to the W keys that a query may see) over seconds, as a share of the best rate of matrix products, in "
    "bursts of a second, in this run. peak_bytes: peak memory of such a step, measured in a separate "
    "process."
)
REFERENCE = "slide-plus"
BURST_SECONDS = 1.0
"""Products are timed in bursts of about this long: a single product could be faster than any sustained work,
and the limit would be unreachable."""
OWN_SIZES = ("micro", "tiny", "small")
"""Sizes for two cores: measured with all lanes of their preset and with the optimizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: tiny)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), metavar="A,B", help="systems to measure (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats; the best counts (default: 5)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="vocabulary size (default: 32000)")
    parser.add_argument("--lanes", type=int, help="lanes of slide-plus (default: the preset's up to small, then 1)")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout (default: 0; training has 0.05)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="model.KEY=VALUE", help="a setting for all systems (repeatable)"
    )
    parser.add_argument("--no-peak", action="store_true", help="skip the measurement of memory")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per system."""
    shown = chosen(args.systems, SYSTEMS, "system")
    systems = list(dict.fromkeys([REFERENCE, *shown]))
    given = {"vocab_size": args.vocab_size, "dropout": args.dropout, "attention_dropout": args.dropout}
    given |= _model_settings(args.set)
    configs = {name: preset(name, args.size, **given) for name in systems}
    tokens = _reference_lanes(args) * configs[REFERENCE].segment
    lanes = {name: tokens // config.segment for name, config in configs.items()}  # the same tokens for all
    optimizer = default_optimizer(args.size) if args.size in OWN_SIZES else None
    common: Weights = {}
    candidates: dict[str, Callable[[], object]] = {
        name: TrainingStep(config, lanes[name], optimizer, common) for name, config in configs.items()
    }
    gemms = _gemms(configs[REFERENCE], lanes[REFERENCE])
    products = {name: product for name, (product, _) in gemms.items()}
    best = best_seconds(candidates | products, args.repeats + 1, clear=make_room)
    candidates.clear()
    common.clear()
    rate = max(flops / best[name] for name, (_, flops) in gemms.items())
    costs = {name: cost_of(config).flops_per_token for name, config in configs.items()}
    rows = []
    for name in shown:
        row = {
            "system": name,
            "seconds": round(best[name], 4),
            "relative": round(best[name] / best[REFERENCE], 4),
            "flop_ratio": round(costs[name] / costs[REFERENCE], 4),
            "paper": SYSTEMS[name].step_time,
            "limit_share": round(costs[name] * tokens / best[name] / rate, 4),
        }
        if not args.no_peak:
            row["peak_bytes"] = peak_bytes_of(_one_step, configs[name], lanes[name], optimizer)
        rows.append(row)
    return rows


class TrainingStep:
    """Forward and backward on one segment, with the memory carried between calls; optionally an update.

    common: weights of other models. Without updates, those of the same name and shape are used: at 160m, models of all
    systems together would take more memory than a step.
    """

    def __init__(
        self, config: ModelConfig, lanes: int, optimizer: OptimizerConfig | None = None, common: Weights | None = None
    ) -> None:
        import torch

        from block_recurrent.model.language_model import BlockRecurrentLM
        from block_recurrent.train.optimizer import make_optimizer

        torch.manual_seed(0)
        self.model = BlockRecurrentLM(config).train()
        self.optimizer = make_optimizer(self.model, optimizer) if optimizer else None
        if common is not None and self.optimizer is None:
            for name, parameter in self.model.named_parameters():
                parameter.data = common.setdefault((name, parameter.shape), parameter.data)
        self.tokens = torch.randint(0, config.vocab_size, (lanes, config.segment + 1))
        self.memory = full_memory(config, lanes)

    def __call__(self) -> None:
        loss = self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:], self.memory)
        (loss.sum / loss.count).backward()
        self.memory = loss.memory.detach()
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None


def full_memory(config: ModelConfig, lanes: int) -> DocumentMemory:
    """The memory of lanes in the middle of a document: kNN memories are full of random entries."""
    import torch
    from torch.nn import functional as F

    from block_recurrent.model.memory import DocumentMemory

    memory = DocumentMemory.empty(config, lanes)
    layers = []
    for layer in memory.layers:
        knn = layer.knn
        while knn is not None and min(knn.counts) < knn.size:
            keys, values = torch.randn(2, lanes, config.num_heads, config.window, config.head_dim)
            knn = knn.append(F.normalize(keys, dim=-1), values, lanes * [True])
        layers.append(replace(layer, knn=knn))
    return replace(memory, layers=tuple(layers))


def _one_step(config: ModelConfig, lanes: int, optimizer: OptimizerConfig | None) -> None:
    step = TrainingStep(config, lanes, optimizer)
    step()
    step()


def _gemms(config: ModelConfig, lanes: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Matrix products to measure the machine: a large cube, and the shapes of the model."""
    import torch

    tokens, D, F, HK = lanes * config.segment, config.d_model, config.mlp_dim, config.num_heads * config.head_dim
    shapes = {(2048, 2048, 2048), (tokens, D, F), (tokens, F, D), (tokens, D, HK), (D, tokens, F)}
    products: dict[str, tuple[Callable[[], object], float]] = {}
    for m, k, n in sorted(shapes):
        a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        one = _burst(a, b, out, 1)
        count = max(1, round(BURST_SECONDS / best_seconds({"": one}, 3)[""]))
        products[f"{m}x{k}x{n}"] = (_burst(a, b, out, count), count * 2.0 * m * k * n)
    return products


def _burst(a: Tensor, b: Tensor, out: Tensor, count: int) -> Callable[[], object]:
    import torch

    def products() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return products


def _reference_lanes(args: argparse.Namespace) -> int:
    if args.lanes is None:
        return preset_lanes(REFERENCE, args.size) if args.size in OWN_SIZES else 1
    if args.lanes < 1:
        raise ConfigError(f"--lanes is {args.lanes}: it must be at least 1")
    return args.lanes


def _model_settings(texts: list[str]) -> dict[str, Any]:
    settings = parse_settings(texts)
    if other := [section for section in settings if section != "model"]:
        raise ConfigError(f"--set has the section '{other[0]}': only settings of the model are allowed here")
    return settings.get("model", {})

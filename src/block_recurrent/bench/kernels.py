"""`brt bench kernels`: the C kernels compared with the torch code that they replace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from block_recurrent.bench.harness import best_seconds
from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError
from block_recurrent.presets import SIZES, preset, preset_lanes

SUMMARY = "the C kernels compared with torch, individually and in a training step"
EXAMPLE = "brt bench kernels --size tiny"
NOTE = (
    "Forward and backward, alternating, best of the repeats, at the shapes that one layer of rec-fixed-skip "
    "has in a training step (attention, norm), that its loss has (cross-entropy), and of the whole step; search: of "
    "one block of the memorizing system with a full memory, and attention over what it finds. speedup: torch over "
    "kernels. A kernel that would be slower than torch at a size is not used there: the speedup is then about 1."
)
SYSTEM = "rec-fixed-skip"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: tiny)")
    parser.add_argument("--lanes", type=int, help="lanes (default: the preset's for tiny and small, otherwise 1)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="vocabulary size (default: 32000)")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats; the best counts (default: 5)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each kernel, and one for the step."""
    from block_recurrent.ops import backend, cpp

    if cpp.LIBRARY is None:
        raise ConfigError("this installation has no C kernels: see 'brt doctor'")
    config = preset(SYSTEM, args.size, vocab_size=args.vocab_size, dropout=0.0, attention_dropout=0.0)
    lanes = args.lanes or (preset_lanes(SYSTEM, args.size) if args.size in ("tiny", "small") else 1)
    rows = []
    for name, work in _works(config, lanes).items():
        torch_backend = "chunked" if name == "cross-entropy" else "tiled"

        def without(work: Callable[[], object] = work, torch_backend: str = torch_backend) -> None:
            with backend(torch_backend):
                work()

        best = best_seconds({"kernels": work, "torch": without}, args.repeats + 1)
        row = {"what": name, "kernels_seconds": round(best["kernels"], 5), "torch_seconds": round(best["torch"], 5)}
        rows.append(row | {"speedup": round(best["torch"] / best["kernels"], 3)})
    return rows


def _works(config: ModelConfig, lanes: int) -> dict[str, Callable[[], object]]:
    import torch

    from block_recurrent.bench.steptime import TrainingStep, full_memory
    from block_recurrent.nn.norm import RMSNorm
    from block_recurrent.ops import cross_entropy, window_attention

    torch.manual_seed(0)
    N, W, H, K, D = config.segment, config.window, config.num_heads, config.head_dim, config.d_model
    q, k, v = (torch.randn(lanes, H, length, K, requires_grad=True) for length in (N, W + N, W + N))
    bias = torch.randn(H, W, requires_grad=True)
    x, norm = torch.randn(lanes, N, D, requires_grad=True), RMSNorm(D)
    hidden = (torch.randn(lanes * N, D) / D**0.5).requires_grad_()
    table = torch.randn(config.vocab_size, D, requires_grad=True)
    targets = torch.randint(config.vocab_size, (lanes * N,))

    def attention() -> None:
        torch.autograd.grad(window_attention(q, k, v, bias).sum(), (q, k, v, bias))

    def normalize() -> None:
        torch.autograd.grad(norm(x).sum(), (x, norm.weight))

    def loss() -> None:
        torch.autograd.grad(cross_entropy(hidden, table, targets, targets >= 0).total, (hidden, table))

    memorizing = replace(config, recurrent_layers=(), memory_layers=(1,), num_layers=1)
    memory = full_memory(memorizing, lanes).layers[0].knn
    assert memory is not None

    def search() -> None:
        torch.autograd.grad(memory.attend(q[:, :, :W], config.memory_neighbors).sum(), q)

    step = TrainingStep(config, lanes)
    return {"attention": attention, "norm": normalize, "cross-entropy": loss, "search": search, "step": step}

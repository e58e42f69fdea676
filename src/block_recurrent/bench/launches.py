"""`brt bench launches`: the number of GPU kernels of a training step, counted without a GPU."""

from __future__ import annotations

import argparse
from typing import Any

from block_recurrent.presets import preset

SUMMARY = "kernels and saved bytes of a training step on a GPU, counted on meta tensors"
EXAMPLE = "brt bench launches --systems slide-plus"
NOTE = (
    "Forward and backward pass of one segment under bfloat16 autocast, with the kernels for a GPU with triton; "
    "each operator of torch counts as one kernel, except for views and allocations, those of this "
    "package by their launches. first: the same in version 0.1.0. share: of first. saved_gib: for the backward pass, "
    "without the weights. fp32_gflop: the largest product in float32. a100_ms and h100_ms: rooflines, with each "
    "kernel limited by its products or its bytes at the peak rate; no GPU was measured. waits: copies that "
    "synchronize."
)
FIRST = {
    "slide-plus": 834 + 1070,
    "rec-fixed-skip": 1167 + 1591,
    "rec-lstm-dual": 1414 + 1972,
    "feedback-fixed-skip": 6861 + 11023,
    "memorizing": 734 + 984,
}
"""Kernels at 160m with one lane before there were kernels in Triton."""


GPUS = {"a100_ms": (312e12, 19.5e12, 1.555e12), "h100_ms": (989e12, 67e12, 3.35e12)}
"""FLOP/s in bfloat16 and in float32, and bytes a second, of an A100 of 40 GB and an H100 (SXM)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--systems", default=",".join(FIRST), help=f"systems to count (default: {','.join(FIRST)})")
    parser.add_argument("--size", default="160m", help="size of the preset (default: 160m)")
    parser.add_argument("--lanes", type=int, default=1, help="lanes (default: 1)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="vocabulary size (default: 32000)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each system."""
    import torch

    from block_recurrent.train.meta import trace_step

    rows = []
    for system in args.systems.split(","):
        trace = trace_step(preset(system, args.size, vocab_size=args.vocab_size), args.lanes)
        forward, backward = (sum(part.kernels.values()) for part in (trace.forward, trace.backward))
        products = trace.forward.products + trace.backward.products
        first = FIRST.get(system) if args.size == "160m" and args.lanes == 1 else None
        rows.append(
            {
                "system": system,
                "forward": forward,
                "backward": backward,
                "first": first,
                "share": first and round((forward + backward) / first, 3),
                "saved_gib": round(trace.saved_bytes / 2**30, 3),
                "fp32_gflop": round(max((n for d, n in products if d == torch.float32), default=0) / 1e9, 3),
                **{name: _roofline_ms(gpu, trace) for name, gpu in GPUS.items()},
                "waits": len(trace.forward.waits) + len(trace.backward.waits),
            }
        )
    return rows


def _roofline_ms(gpu: tuple[float, float, float], trace: Any) -> float:
    half, full, bandwidth = gpu
    work = trace.forward.work + trace.backward.work
    seconds = (max(flops / (half if dtype.itemsize == 2 else full), moved / bandwidth) for dtype, flops, moved in work)
    return round(1000 * sum(seconds), 1)

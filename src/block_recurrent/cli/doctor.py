"""`brt doctor`: hardware, versions, and the settings chosen for them."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from block_recurrent.allocator import keep_freed_memory
from block_recurrent.cli.output import add_json, check_outputs, give_json, in_snake_case
from block_recurrent.errors import ConfigError

CORE = ("torch", "numpy", "safetensors", "sentencepiece", "rich")
EXTRAS = {
    # extra: (the package that tells whether it is installed, its use)
    "parquet": ("pyarrow", "Parquet sources"),
    "datasets": ("datasets", "datasets of the Hugging Face Hub, hf:NAME"),
    "tensorboard": ("tensorboard", "training curves"),
    "wandb": ("wandb", "training curves in Weights & Biases"),
    "plots": ("matplotlib", "plots as PNG"),
    "hf": ("transformers", "brt export for transformers"),
    "lm-eval": ("lm_eval", "lm-evaluation-harness"),
    "peers": ("block-recurrent-transformer-pytorch", "brt bench peers"),
    "serve": ("fastapi", "brt serve"),
}
GEMM = 2048
KEPT = "is kept for reuse"
NO_KERNELS = "missing, torch is used instead; to build them, reinstall on Linux with gcc and an AVX2 processor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json")
    facts = _facts()
    give_json(args, {title: in_snake_case(section) for title, section in facts.items()})
    for title, section in facts.items() if args.json != "-" else ():
        print(f"{title}:")
        width = max(map(len, section))
        for name, value in section.items():
            print(f"  {name:{width}}  {value}")
    return 0


def _facts() -> dict[str, dict[str, Any]]:
    import torch

    from block_recurrent import __version__
    from block_recurrent.bench.harness import machine
    from block_recurrent.ops import cpp, registry
    from block_recurrent.runtime import pick_device, pick_dtype

    device = pick_device("auto")
    kept = keep_freed_memory()
    extras = {name: _version(package) for name, (package, _) in EXTRAS.items()}
    return {
        "versions": {
            "block-recurrent": __version__,
            "python": platform.python_version(),
            **{name: _version(name) or "missing" for name in CORE},
        },
        "machine": {
            **machine(),
            "threads of torch": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "choices": {
            "--device auto": f"{device}{'' if device.type == 'cpu' else f' ({torch.cuda.get_device_name(device)})'}",
            "--dtype auto": str(pick_dtype("auto", device)).removeprefix("torch."),
            "--dtype bfloat16": _bfloat16(device),
            "freed memory": KEPT if kept else "is returned to the system by the C library",
            "kernels in C": "in use" if cpp.LIBRARY else NO_KERNELS,
        },
        "kernels": {
            f"{op}: {row.backend}": f"{_calls(row)}: {row.why}" for op, rows in registry.TABLE.items() for row in rows
        },
        "speed": {f"matrix product, {GEMM} cubed, float32": f"{_gemm_rate(device) / 1e9:,.0f} GFLOP/s (best of 5)"},
        "extras": {
            name: f"{version} ({EXTRAS[name][1]})"
            if version
            else f"not installed ({EXTRAS[name][1]}): pip install 'block-recurrent[{name}]'"
            for name, version in extras.items()
        },
    }


def _calls(row: Any) -> str:
    """Which calls a backend handles, as text."""
    dtypes = "/".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
    return ", ".join(filter(None, (row.device.replace("any", "any device"), dtypes, row.sizes)))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bfloat16(device: Any) -> str:
    from block_recurrent.runtime import pick_dtype

    try:
        pick_dtype("bfloat16", device)
    except ConfigError as error:
        return f"no: {error}"
    return "works" if device.type != "cpu" else "works; rarely faster than float32 on a CPU"


def _gemm_rate(device: Any) -> float:
    """FLOP/s of a large matrix product, best of five."""
    import torch

    from block_recurrent.bench.harness import best_seconds

    a, b = torch.randn(GEMM, GEMM, device=device), torch.randn(GEMM, GEMM, device=device)
    product = "matrix product"
    best = best_seconds({product: lambda: (a @ b)[0, 0].item()}, rounds=5)  # item() synchronizes with a GPU
    return 2 * GEMM**3 / best[product]

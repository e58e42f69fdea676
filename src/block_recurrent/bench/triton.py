"""`brt bench triton`: registers and shared memory of the Triton kernels, compiled without a GPU."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from typing import Any

from block_recurrent.errors import ConfigError

SUMMARY = "registers, spills and shared memory of the Triton kernels, compiled ahead of time"
EXAMPLE = "brt bench triton --head-sizes 64,128"
NOTE = (
    "Compiled for the GPU architectures by the installed triton and its ptxas, at the tile sizes in use; no GPU is "
    "needed, and nothing is run. Each is compiled twice, as triton does: for numbers of tokens that are multiples of "
    "16, and for others; the larger counts are given. threads and shared (bytes of shared memory): per program; an "
    "A100 has 163 KiB for one, an H100 227 KiB. registers, and spilled (bytes that did not fit into them): per thread. "
    "size: of heads, or of the vectors of norms. queries and keys: of a tile; for norms, vectors of a program and 0."
)
ATTENTION = ("forward", "queries_backward", "keys_backward")
NORMS = {
    "rms": ("ADDED", "DROPOUT"),
    "rms_backward": ("SUM", "ADDED", "DROPOUT"),
    "add_dropout": ("ADD",),
    "heads": (),
    "heads_backward": ("NEXT", "OLD"),
}
"""Kernels of normalization, and the flags that include all of their code."""
FLOAT32 = {
    *("bias", "log_sums", "deltas", "d_bias"),
    *("weight", "d_weight", "scales", "d_scales", "inverses", "sum", "d_sum"),
}
"""Pointers to float32 with every dtype."""

TOKENS = {"N", "C", "rows", "fixed_keys"}
"""Numbers of tokens: of a call, cached, of all lanes, and cached without a gradient."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architectures", default="80,90", help="80 is an A100, 90 an H100 (default: 80,90)")
    parser.add_argument("--head-sizes", default="32,64,128,256", help="head dimensions (default: 32,64,128,256)")
    parser.add_argument("--widths", default="1024,2048", help="widths of norms (default: 1024,2048)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="dtypes of products (default: bfloat16,float32)")
    parser.add_argument("--window", type=int, default=512, help="window (default: 512)")
    parser.add_argument("--dropout", type=float, default=0.05, help="dropout; 0 compiles without it (default: 0.05)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each kernel, architecture, dtype and head size."""
    from block_recurrent.ops import triton

    if not triton.INSTALLED:
        raise ConfigError("triton 3.3 or newer is required: pip install triton (on Linux)")
    if triton.interpreted():
        raise ConfigError(
            "TRITON_INTERPRET is set in the environment: unset it, since the interpreter compiles nothing"
        )
    architectures, heads, widths = (
        [int(x) for x in text.split(",")] for text in (args.architectures, args.head_sizes, args.widths)
    )
    kernels = [(kernel, size) for kernel in ATTENTION for size in heads]
    kernels += [(kernel, size) for kernel in NORMS for size in (heads if kernel.startswith("heads") else widths)]
    return [
        _row(kernel, architecture, dtype, size, args.window, args.dropout)
        for kernel, size in kernels
        for dtype in args.dtypes.split(",")
        for architecture in architectures
    ]


def _row(kernel: str, architecture: int, dtype: str, size: int, window: int, dropout: float) -> dict[str, Any]:
    import torch

    from block_recurrent.io.progress import tell
    from block_recurrent.ops.triton.attention import constants, tiles_of
    from block_recurrent.ops.triton.norm import constants_of_heads, constants_of_rows

    tell(f"{kernel} in {dtype} with vectors of {size} for sm_{architecture}")
    if kernel in ATTENTION:
        chosen = constants(kernel, size, getattr(torch, dtype), window, dropout)
        tiles = tiles_of(kernel, size, getattr(torch, dtype))
        queries, keys = tiles.queries, tiles.keys
    else:
        chosen = constants_of_heads(size) if kernel.startswith("heads") else constants_of_rows(size)
        chosen |= dict.fromkeys(NORMS[kernel], True)
        queries, keys = chosen.get("ROWS", 1), 0
    both = [_compile(kernel, architecture, dtype, chosen, multiples) for multiples in (False, True)]
    printed = "".join(_ptxas(compiled.asm["ptx"]) for compiled in both)
    spills, registers = (
        [int(found) for found in re.findall(pattern, printed)]
        for pattern in (r"(\d+) bytes spill (?:stores|loads)", r"Used (\d+) registers")
    )
    tell("")
    return {
        "kernel": kernel,
        "architecture": f"sm_{architecture}",
        "dtype": dtype,
        "size": size,
        "queries": queries,
        "keys": keys,
        "threads": 32 * both[0].metadata.num_warps,
        "stages": both[0].metadata.num_stages,
        "registers": max(registers),
        "spilled": max(spills),
        "shared": max(compiled.metadata.shared for compiled in both),
    }


def _compile(kernel: str, architecture: int, dtype: str, chosen: dict[str, Any], multiples: bool) -> Any:
    """The specialization of a launch with contiguous rows of whole heads, and perhaps numbers of tokens in `TOKENS`
    that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from block_recurrent.ops.triton import attention_kernels, norm_kernels

    function = getattr(attention_kernels if kernel in ATTENTION else norm_kernels, kernel)
    options = {name: chosen[name] for name in ("num_warps", "num_stages") if name in chosen}
    chosen = {name: value for name, value in chosen.items() if name not in options}
    full = FLOAT32 | ({"x", "dx", "out"} if "D" in chosen else set())  # of norms: the residual stream
    signature: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(function.arg_names):
        if name in chosen:
            signature[name] = "constexpr"
        elif name.endswith("_strides"):
            signature[name] = ("i32",) * 3
            aligned |= {(place, axis): [["tt.divisibility", 16]] for axis in range(3)}
        elif name.endswith("_pointer"):
            signature[name] = "*fp32" if dtype == "float32" or name.removesuffix("_pointer") in full else "*bf16"
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = {"keep_scale": "fp32", "epsilon": "fp32", "seed": "i64"}.get(name, "i32")
            if multiples and name in TOKENS:
                aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, chosen, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _ptxas(ptx: str) -> str:
    """The output of ptxas."""
    import triton

    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert found is not None
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [path, "-v", f"--gpu-name={found[1]}", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

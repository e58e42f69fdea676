"""The runtime: device, precision, random numbers, rank and world size. The only reader of the environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from block_recurrent.errors import BlockRecurrentError, ConfigError
from block_recurrent.ops.precision import MetaAutocast

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Timeout for waiting on other processes: long enough for the slowest to write a checkpoint."""


@dataclass(frozen=True)
class Runtime:
    """This process, its group, and its device."""

    device: torch.device
    dtype: torch.dtype  # of the computation; weights are float32
    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def facts(self) -> dict[str, Any]:
        """What two runs must have in common to produce identical results, bit for bit."""
        return {
            "machine": platform.node(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "world": self.world,
            "device": self.device.type,
        }

    def sums(self, *values: float) -> list[float]:
        """Each number summed over all processes, in float64; the same bits on each process."""
        numbers = torch.tensor([float(x) for x in values], dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(numbers)  # on CPUs: no process waits for its GPU
        return numbers.tolist()

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather the value of every process, by rank. For small values."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value, group)
        return gathered

    def from_main(self, value: Any) -> Any:
        """Broadcast the value of rank 0. For small values."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on all; a BlockRecurrentError there is raised on every process."""
        outcome: tuple[T | None, BlockRecurrentError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (work(), None)
            except BlockRecurrentError as error:
                if self.world == 1:
                    raise
                outcome = (None, error)
        result, failure = self.from_main(outcome)
        if failure is not None:
            raise failure
        return result

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of `dtype`."""
        if self.device.type == "meta":
            return MetaAutocast(self.dtype)
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


@contextmanager
def start(
    device: str = "auto", dtype: str = "auto", deterministic: bool = True, tf32: bool = False
) -> Iterator[Runtime]:
    """The runtime of this process; under torchrun, part of a group until the end: gloo for CPUs, nccl for GPUs.

    On GPUs, deterministic: reproducible results, but slower; tf32: float32 products with 10 bits of precision.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = pick_device(device)
    if place.type == "cuda":
        if deterministic:
            # For reproducible products; cuBLAS reads this when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Otherwise one more kernel for each new tensor, such as the outputs of this package's kernels.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.cuda.set_device(place)
    runtime = Runtime(place, pick_dtype(dtype, place), rank, world)
    # torchrun with one process is a group too: FSDP needs one.
    group_here = "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if group_here:
        # Python's numbers are exchanged between CPUs also where tensors are on GPUs.
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield runtime
    finally:
        if group_here:
            # Gloo's threads release the last messages only while Python sleeps; a group that is destroyed before that
            # waits for them forever, while they wait for Python (seen once in ten runs).
            time.sleep(0.2)
            dist.destroy_process_group()


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ


def launcher() -> str:
    """How this process was started: the beginning of the command line that restarts it."""
    if not is_launched():
        return "brt"
    return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 1)} -m block_recurrent"


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is the GPU of this process, if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is '{name}': it must be auto, cpu, cuda or cuda:0, cuda:1, ...")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device is '{name}', but torch finds no GPU: use --device cpu")
        if (count := torch.cuda.device_count()) <= (device.index or 0):
            raise ConfigError(f"device is '{name}', but the last GPU of this machine is cuda:{count - 1}")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name. `auto` is bfloat16 only on GPUs that support it: most CPUs are 100 times slower in it."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if name == "bfloat16" and device.type == "cpu":
        _check_bfloat16_on_cpu()
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _check_bfloat16_on_cpu() -> None:
    """Some virtual machines report instructions (AMX) that they lack: a product in bfloat16 then kills the process."""
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", product], capture_output=True, check=False).returncode:
        raise ConfigError(
            "dtype is bfloat16, but bfloat16 products crash on this CPU: use float32 (rarely slower on a CPU), or set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        )


def seed(seed: int, rank: int = 0) -> None:
    """Seed torch's random number generators, differently on each rank (dropout must differ); any seed is valid."""
    torch.manual_seed((seed * 1_000_003 + rank) % 2**63)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's random number generators, for exact resume."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

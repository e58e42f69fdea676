"""Shared by all benchmarks: fair timing in turns, and the facts that belong to a result."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from block_recurrent.allocator import give_back_freed_memory, keep_freed_memory
from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.io.progress import tell

PACKAGES = ("block-recurrent", "torch", "triton", "numpy", "sentencepiece")
MUCH = 0.45
"""Share of the machine's memory: block feedback and memorizing at 160m need half of 24 GB and more, in pieces of
different sizes."""
FETCHED, MOST_TRIES = 2**28, 3
"""Bytes of new pages from the system that would affect a time. Fragmentation of kept memory may need a second
try."""


def best_seconds(
    candidates: Mapping[str, Callable[[], object]], rounds: int, clear: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The best time of each candidate, in turns, so that other load on the machine affects all alike.

    The order alternates, so that none always follows the same one. A candidate that had to allocate
    much memory from the system is repeated, since that is not part of its work. `clear` runs after each.
    """
    best = dict.fromkeys(candidates, float("inf"))
    order = list(candidates)
    for number in range(1, rounds + 1):
        for name in order if number % 2 else reversed(order):
            tell(f"round {number} of {rounds}: {name}")
            for _ in range(MOST_TRIES):
                before = resident_bytes()
                seconds = seconds_of(candidates[name])
                if resident_bytes() - before < FETCHED:
                    break
            best[name] = min(best[name], seconds)
            clear()
    tell("")
    return best


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def paired_rates(
    ours: tuple[str, Callable[[], object]],
    theirs: tuple[str, Callable[[], object]],
    tokens: int,
    pairs: int,
    warm_up: int,
) -> dict[str, Any]:
    """Two functions in turns, with equal numbers of tokens: the median rates, and the median ratio of neighbors."""
    both = [(seconds_of(ours[1]), seconds_of(theirs[1])) for _ in range(pairs + warm_up)][warm_up:]
    rates = [round(tokens / statistics.median(side), 1) for side in zip(*both, strict=True)]
    found = {f"{name} tokens/s": rate for (name, _), rate in zip((ours, theirs), rates, strict=True)}
    return found | {"ratio": round(statistics.median(a / b for a, b in both), 4), "pairs": pairs}


def chosen(names: str, known: Iterable[str], what: str) -> list[str]:
    """Parse a list A,B of known names."""
    known, found = list(known), [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise ConfigError(f"there is no {what} '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    return found


def with_origin(found: dict[str, Any]) -> dict[str, Any]:
    """Results with the command line, machine and versions that they come from."""
    return {"command": shlex.join(["brt", *sys.argv[1:]]), **found, "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_bytes_of(work: Callable[..., object], *arguments: Any) -> int:
    """Peak memory of a separate process while it does this work, above what it starts with."""
    give_back_freed_memory()  # which the process may need
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_bytes, (work, arguments))


def _peak_bytes(work: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    # Imported before the first measurement: code is not part of the work.
    from block_recurrent.train import optimizer

    assert optimizer
    keep_freed_memory()
    before = resident_bytes()
    work(*arguments)
    return _peak_resident_bytes() - before


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    try:
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def make_room() -> None:
    """Return freed memory to the system if it is a large share: contenders of different shapes fragment it."""
    used = resident_bytes()
    if used and used > MUCH * os.sysconf("SC_PHYS_PAGES") * resource.getpagesize():
        give_back_freed_memory()


def _peak_resident_bytes() -> int:
    """Peak memory of this process since its program was started; `getrusage` would include its parent's memory."""
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

"""What every benchmark shares: fair timing side by side, and what must be said beside a number."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from block_recurrent.allocator import give_back_freed_memory, keep_freed_memory
from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.io.progress import tell

PACKAGES = ("block-recurrent", "torch", "triton", "numpy", "sentencepiece")
MUCH = 0.45
"""Of the machine's memory: block feedback and the memorizing system at 160m need half of 24 GB and more, in pieces of
other sizes."""
FETCHED, MOST_TRIES = 2**28, 3
"""Bytes: so many new pages from the system would show in a time. Gaps in the memory that is kept may need a second
try."""


def best_seconds(
    candidates: Mapping[str, Callable[[], object]], rounds: int, clear: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The best time of each candidate, in turns: whatever else the machine does hits all of them alike.

    Forwards in one round and backwards in the next, so that none always follows the same one. One that had to fetch
    much memory from the system runs again: that is no part of its work. `clear` runs after each.
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
    """Two works in turns, so many tokens each: the median rate of either, and the median ratio of neighbours."""
    both = [(seconds_of(ours[1]), seconds_of(theirs[1])) for _ in range(pairs + warm_up)][warm_up:]
    rates = [round(tokens / statistics.median(side), 1) for side in zip(*both, strict=True)]
    found = {f"{name} tokens/s": rate for (name, _), rate in zip((ours, theirs), rates, strict=True)}
    return found | {"ratio": round(statistics.median(a / b for a, b in both), 4), "pairs": pairs}


def chosen(names: str, known: Iterable[str], what: str) -> list[str]:
    """The names of a list A,B, each of which must be known."""
    known, found = list(known), [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise ConfigError(f"there is no {what} '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    return found


def report(rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Rows with what is needed to read them later: machine, versions, command."""
    return {"rows": rows, "machine": machine(), "versions": versions(), "command": command}


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
    """The most memory that a process of its own has in use while it does this work, above what it starts with."""
    give_back_freed_memory()  # which that process may need
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_bytes, (work, arguments))


def _peak_bytes(work: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    # Loaded before the first measurement: programs are no part of the work.
    from block_recurrent.train import optimizer

    assert optimizer
    keep_freed_memory()
    before = resident_bytes()
    work(*arguments)
    return _peak_resident_bytes() - before


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def make_room() -> None:
    """Give freed memory back where it is much of the machine's: contenders of different shapes leave gaps in it."""
    used = resident_bytes()
    if used and used > MUCH * os.sysconf("SC_PHYS_PAGES") * resource.getpagesize():
        give_back_freed_memory()


def _peak_resident_bytes() -> int:
    """Of this process since its program was started; `getrusage` would count its parent's memory before that, too."""
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

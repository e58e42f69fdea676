"""What every benchmark shares: fair timing side by side, and what must be said beside a number."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

PACKAGES = ("block-recurrent", "torch", "numpy", "sentencepiece")


def best_seconds(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each candidate, in turns: whatever else the machine does hits all of them alike."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, candidate in candidates.items():
            begin = time.perf_counter()
            candidate()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


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

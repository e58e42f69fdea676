"""Freed memory stays with the process, where that can be arranged."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from block_recurrent import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
for _ in range(20):
    block = bytearray(64 << 20)
    del block
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(how: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    kept, pages = done.stdout.split()
    return kept == "True", int(pages)


def test_pages_are_fetched_once() -> None:
    kept, pages = faults("keep")
    if not kept:
        pytest.skip("this C library has no mallopt")
    assert pages < faults("leave")[1] / 5


def test_what_is_kept_can_be_given_back() -> None:
    program = """
from block_recurrent.allocator import give_back_freed_memory, keep_freed_memory
from block_recurrent.bench.harness import resident_bytes
if not keep_freed_memory():
    print(0, 1)
    raise SystemExit
held = [bytearray(1 << 20) for _ in range(200)]
last = bytearray(1 << 20)  # behind them: what is in the way of giving back from the end
held.clear()
before = resident_bytes()
give_back_freed_memory()
print(resident_bytes(), before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    after, before = map(int, done.stdout.split())
    if not after:
        pytest.skip("this C library has no mallopt")
    assert before - after > 150 << 20

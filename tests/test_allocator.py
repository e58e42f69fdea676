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

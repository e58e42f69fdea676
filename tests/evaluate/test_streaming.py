"""`brt eval` streams: a document of two million tokens takes no more memory than one of a hundred thousand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from block_recurrent import BlockRecurrentLM
from block_recurrent.data import Corpus

PROGRAM = """
import resource, sys
from block_recurrent.cli.main import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""
SLACK = 24 * 1024  # KiB; the losses of two million tokens alone are 16 MB in float64, their tokens as much


def peak_kib(run: Path, corpus: Corpus, *flags: str) -> int:
    arguments = [sys.executable, "-c", PROGRAM, "eval", str(run), "--data", str(corpus.folder), *flags]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    return int(printed.split("peak ")[-1])


def grows_by(
    lengths: tuple[int, int], make_corpus: Callable[..., Corpus], run: Path, flags: tuple[str, ...] = ()
) -> int:
    text = "It was the best of times, it was the worst of times. "
    corpora = [
        make_corpus({"book.txt": (text * (length // len(text) + 1))[:length]}, name=f"book-{length}")
        for length in lengths
    ]
    short, long = (peak_kib(run, corpus, *flags) for corpus in corpora)
    return long - short


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--clear-every", "1024")])
def test_two_million_tokens(
    make_corpus: Callable[..., Corpus],
    make_run: Callable[..., Path],
    make_reader: Callable[..., BlockRecurrentLM],
    flags: tuple[str, ...],
) -> None:
    assert grows_by((100_000, 2_000_000), make_corpus, make_run(make_reader()), flags) < SLACK

"""`brt bench data`: speed of `brt data prepare`, compared with a loop that only reads and encodes the same files."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.bench.harness import best_seconds

if TYPE_CHECKING:
    from block_recurrent.data.tokenizers.base import Tokenizer

SUMMARY = "throughput of 'brt data prepare', compared with a bare loop over the same files"
EXAMPLE = "brt bench data --json build/bench-data.json"
NOTE = (
    "MB of text per second, best of the rounds, alternating. bare: one thread reads each file and calls the "
    "tokenizer, nothing else. prepare: also hashes, counts, writes and syncs, with all threads. ratio: bare / prepare."
)
BYTES_PER_SUBWORD_BYTE = 25  # subwords are slower; this keeps both parts about equally long
TRAINING_BYTES = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", default="stdlib", metavar="SOURCE", help="source of the text (default: stdlib)"
    )
    parser.add_argument("--tokenizer", help="SentencePiece file (default: 8000 pieces trained on the text)")
    parser.add_argument(
        "--megabytes", type=int, default=200, help="amount of text for bytes, repeated as needed (default: 200)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; the best counts (default: 5)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per tokenizer."""
    from block_recurrent.data.tokenizers.base import ByteTokenizer, load_tokenizer

    with tempfile.TemporaryDirectory(prefix="brt-bench-") as name:
        work = Path(name)
        texts = list(_texts(args.source))
        subwords = load_tokenizer(args.tokenizer) if args.tokenizer else _train(texts, work)
        size = args.megabytes * 1_000_000
        return [
            _row("bytes", ByteTokenizer(), _lay_out(texts, work / "bytes", size), args.rounds),
            _row("sentencepiece", subwords, _lay_out(texts, work / "few", size // BYTES_PER_SUBWORD_BYTE), args.rounds),
        ]


def _row(name: str, tokenizer: Tokenizer, folder: Path, rounds: int) -> dict[str, Any]:
    from block_recurrent.data.corpus.prepare import PrepareSettings, prepare

    paths = sorted(folder.iterdir())
    settings = PrepareSettings((str(folder),))
    out = folder.parent / "prepared"

    def bare() -> None:
        for path in paths:
            with path.open(encoding="utf-8", newline="") as file:
                tokenizer.encode(file.read())

    def whole() -> None:
        prepare(settings, tokenizer, out)

    seconds = best_seconds(
        {"bare": bare, "prepare": whole}, rounds, clear=lambda: shutil.rmtree(out, ignore_errors=True)
    )
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    return {
        "tokenizer": name,
        "prepare MB/s": round(megabytes / seconds["prepare"], 2),
        "bare MB/s": round(megabytes / seconds["bare"], 2),
        "ratio": round(seconds["prepare"] / seconds["bare"], 3),
        "MB": round(megabytes, 1),
        "documents": len(paths),
        "rounds": rounds,
    }


def _texts(source: str) -> Iterator[bytes]:
    from block_recurrent.data.sources import find_documents
    from block_recurrent.data.sources.document import LeftOut, Remarks

    for found in find_documents(source):
        if not isinstance(found, LeftOut):
            yield b"".join(found.read(Remarks()))


def _train(texts: list[bytes], work: Path) -> Tokenizer:
    from block_recurrent.data.tokenizers.training import train_tokenizer

    sample = work / "train"
    return train_tokenizer([str(_lay_out(texts, sample, TRAINING_BYTES))], 8000)


def _lay_out(texts: list[bytes], folder: Path, size: int) -> Path:
    """Writes the texts as files, again and again until there is enough."""
    folder.mkdir()
    number = 0
    while size > 0:
        text = texts[number % len(texts)][:size]
        (folder / f"{number:06}.txt").write_bytes(text)
        size -= max(len(text), 1)
        number += 1
    return folder

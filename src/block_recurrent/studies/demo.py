"""The parts of `brt demo`: an unseen text, how much its memory helps, and a run that is stopped and resumed."""

from __future__ import annotations

import hashlib
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from block_recurrent import models
from block_recurrent.checkpoint import WEIGHTS, LoadedRun, find_checkpoint
from block_recurrent.errors import DataError
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.sampling import Sampling
from block_recurrent.inference.session import Session
from block_recurrent.inference.text_input import read_text
from block_recurrent.io.progress import Progress
from block_recurrent.models.card import read_card
from block_recurrent.studies.memory_worth import (
    Reading,
    read_document,
    remembered_words,
    session_at,
    three_ways,
)
from block_recurrent.train.report import METRICS, read_metrics

LEAST_BYTES, MOST_BYTES = 30_000, 200_000
"""Size of the module to read: long enough to remember something, short enough for a minute."""
NOT_CODE = ("pydoc_data", "this", "antigravity")
CHART_POINTS = 80
OTHER_BYTES = 30_000
"""Size of the other text, for the second memory."""


@dataclass(frozen=True)
class Unseen:
    """A text to read."""

    name: str
    text: str


def unseen_modules(model: str) -> list[Unseen]:
    """Modules of this Python's standard library that the model's card does not list, the longest first."""
    folder = models.locate(model)[0]
    listed = read_card(folder)["data"]["trained_on"] if (folder / models.CARD).is_file() else []
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path
        for path in library.glob("*.py")
        if path.stem in sys.stdlib_module_names and path.stem not in NOT_CODE and path.name not in listed
        if LEAST_BYTES <= path.stat().st_size <= MOST_BYTES
    ]
    if len(found) < 2:
        raise DataError(f"this Python has no library source in '{library}': give a text with --text FILE")
    found.sort(key=lambda path: (-path.stat().st_size, path.name))
    return [Unseen(path.name, path.read_text(encoding="utf-8")) for path in found]


def given_text(path: str) -> Unseen:
    return Unseen(Path(path).name, "".join(read_text(path)))


@dataclass(frozen=True)
class Document:
    """An unseen text, and a model that reads it."""

    name: str
    engine: Engine
    loaded: LoadedRun
    reading: Reading
    seconds: float

    def session(self, at_end: bool = False) -> Session:
        place = len(self.reading.tokens) if at_end else self.reading.half
        return session_at(self.engine, self.loaded.tokenizer, self.reading, place, self.name)


def read_unseen(loaded: LoadedRun, text: Unseen, most_tokens: int | None, progress: Progress) -> Document:
    """Read a text from beginning to end, or up to a number of tokens."""
    tokens = loaded.tokenizer.encode(text.text)[:most_tokens]
    engine, began = Engine(loaded.model), time.perf_counter()
    reading = read_document(engine, tokens, progress)
    return Document(text.name, engine, loaded, reading, time.perf_counter() - began)


def worth_of(document: Document, progress: Progress) -> dict[str, Any]:
    """Bits per token and per byte of the second half for each way of reading, remembered words, and curves."""
    reading, tokenizer, config = document.reading, document.loaded.tokenizer, document.engine.config
    ways = three_ways(document.engine, reading, progress)
    size = len(tokenizer.decode_bytes(reading.tokens[reading.half :], begin=False))
    words = remembered_words(reading, ways, tokenizer, config.window)
    every = max(1, len(reading.tokens[reading.half :]) // CHART_POINTS)
    return {
        "tokens": len(reading.tokens) - reading.half,
        "bytes": size,
        "bits_per_token": {way: float(bits.mean()) for way, bits in ways.items()},
        "bits_per_byte": {way: float(bits.sum()) / max(size, 1) for way, bits in ways.items()},
        "words": [asdict(word) for word in words],
        "curves": {
            way: [float(bits[i : i + every].mean()) for i in range(0, len(bits), every)] for way, bits in ways.items()
        },
        "gains": _excerpt_gains(document, ways),
    }


def _excerpt_gains(document: Document, ways: dict[str, Any], length: int = 400) -> list[list[Any]]:
    """The passage of the second half where the memory saves most: each token's text, and the bits saved."""
    import numpy as np

    mine, without = list(ways.values())[:2]
    gains, half = without - mine, document.reading.half
    sums = np.convolve(gains, np.ones(min(length, len(gains))), "valid")
    first = int(sums.argmax())
    decode = document.loaded.tokenizer.decode_bytes
    tokens = document.reading.tokens[half + first : half + first + length].tolist()
    texts = [decode([token], begin=False).decode("utf-8", "replace") for token in tokens]
    return [[text, round(float(gain), 2)] for text, gain in zip(texts, gains[first:], strict=False)]


def write_from(session: Session, prompt: str, tokens: int, seed: int) -> str:
    """A continuation; the given session does not change."""
    other = session.fork()
    other.read(prompt)
    # Small models that can copy repeat themselves without a penalty.
    sampling = Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.15, seed=seed, end_at_mark=False)
    return "".join(other.write(tokens, sampling))


def memory_hash(session: Session) -> str:
    """Hash of all tensors of a memory."""
    digest = hashlib.sha256()
    for name, x in sorted(session.memory.named_tensors().items()):
        digest.update(name.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def stopped_at(run: Path, step: int) -> Iterator[None]:
    """Send Ctrl-C to this process as soon as a run has reached a step."""
    done, typed = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            if (run / METRICS).is_file() and (run / METRICS).read_bytes().count(b'"split": "train"') >= step:
                typed.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    def late(number: int, frame: object) -> None:
        if not typed.is_set():  # a Ctrl-C by the user
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, late)  # training has its own handler; this one is for fast machines
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGINT, before)


def run_facts(run: Path) -> dict[str, Any]:
    """Facts to compare two runs by: the hash of their final weights, and the loss of every step."""
    found, _ = find_checkpoint(run)
    assert found is not None
    training = [line for line in read_metrics(run) if line["split"] == "train"]
    validation = [line for line in read_metrics(run) if line["split"] == "validation"]
    return {
        "step": found.step,
        "weights": hashlib.sha256((found.path / WEIGHTS).read_bytes()).hexdigest(),
        "losses": [line["bits_per_token"] for line in training],
        "tokens": training[-1]["tokens_seen"],
        "first_bits": training[0]["bits_per_token"],
        "held_out_bits": validation[-1]["bits_per_token"] if validation else None,
    }

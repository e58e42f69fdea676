"""`brt demo`: the whole system in some minutes, on text that every machine has.

The demo is a list of `brt` commands. Each is printed before it runs, so that it can be tried again with other words.
Every one of them resumes when it is run again, or is quick to repeat; so does the demo.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import NamedTuple

from block_recurrent.errors import BlockRecurrentError, ConfigError

SYSTEMS = ("rec-fixed-skip", "slide-plus")
SIZE = "tiny"
STEPS = 400
WRITTEN = 400
READ_BYTES = 100_000
"""About as long as the module that is read before writing; the nearest in the test split is taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the folder of all it makes")
    parser.add_argument("--source", default="stdlib", help="what to train on: stdlib, a folder or a file")
    parser.add_argument("--size", default=SIZE, help="of both models")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training, for each")


def run(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}: it must be at least 1")
    began = time.monotonic()
    data, runs = args.out / "data", [args.out / system for system in SYSTEMS]
    if not (data / "manifest.json").is_file():
        _brt("data", "prepare", args.source, "--out", data, "--tokenizer", "bytes")
    for system, folder in zip(SYSTEMS, runs, strict=True):
        _brt("train", "--system", system, "--size", args.size, "--data", data, "--out", folder, *_training(args.steps))
    for folder in runs:
        _brt("eval", folder, "--data", data, "--json", folder / "test.json", "--overwrite")
    module = _module_to_read(data, args.out)
    _brt("compare", *runs, "--data", data, "--document", module.name, "--out", args.out, "--no-png", "--overwrite")
    memory = args.out / "module.memory"
    _brt("read", runs[0], module.path, "--memory", memory, "--overwrite")
    _brt("write", runs[0], "--memory", memory, "--tokens", WRITTEN, "--temperature", 0.6, "--seed", 1, "--go-on")
    _close(args, module, time.monotonic() - began)
    return 0


def _brt(*words: object) -> None:
    """Run a command of ours, having shown it."""
    from block_recurrent.cli.main import dispatch

    command = [str(word) for word in words]
    print(f"\n$ brt {shlex.join(command)}", flush=True)
    if dispatch(command):
        raise BlockRecurrentError("the demo was stopped; rerun it to resume")


def _training(steps: int) -> list[object]:
    """A short run: the learning rate falls to its end within it."""
    settings: dict[str, object] = {
        "optimizer.name": "adamw",
        "schedule.kind": "cosine",
        "schedule.learning_rate": 0.004,
        "schedule.final_learning_rate": 0.0002,
        "schedule.warmup": min(40, steps // 4),
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
    }
    every = max(1, steps // 4)
    words: list[object] = ["--steps", steps, "--eval-every", every, "--eval-tokens", 65_536, "--save-every", every]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words


class _Module(NamedTuple):
    """A held-out document as a file."""

    name: str
    path: Path


def _module_to_read(data: Path, out: Path) -> _Module:
    from block_recurrent.data import Corpus

    corpus = Corpus(data)
    documents = corpus.documents("test")
    if not documents:
        raise ConfigError(f"'{data}' has no test documents: give a --source with more documents")
    index = min(range(len(documents)), key=lambda i: abs(documents[i].bytes - READ_BYTES))
    path = out / "module.txt"
    path.write_bytes(b"".join(corpus.text_pieces("test", index)))
    return _Module(documents[index].name, path)


def _close(args: argparse.Namespace, module: _Module, seconds: float) -> None:
    from block_recurrent.io.output import print_table
    from block_recurrent.train.report import read_metrics

    rows = []
    for system in SYSTEMS:
        folder = args.out / system
        scores = json.loads((folder / "test.json").read_text())
        training = [line for line in read_metrics(folder) if line["split"] == "train"]
        speed = sorted(line["tokens_per_second"] for line in training)[len(training) // 2]
        trained = training[-1]["tokens_seen"]
        rows.append(
            [system, f"{trained:,}", f"{speed:,.0f}", f"{scores['bits_per_byte']:.3f}", f"{scores['tokens']:,}"]
        )
    run = args.out / SYSTEMS[0]
    print(f"\nDone in {seconds / 60:.1f} minutes.\n")
    print_table(["system", "tokens trained on", "tokens/s", "bits per byte, held out", "tokens scored"], rows)
    print(
        f"\n{SYSTEMS[1]} costs about the same, but forgets what is a few windows back. So short a training teaches "
        "little\nabout using a memory: what it is worth takes hours, see docs/recall.md and results/.\n"
        f"\nThe report, token by token:  {args.out / 'report.html'}  (open it in a browser)\n"
        f"The memory of {module.name}:  {args.out / 'module.memory'}\n"
        "\nTry next:\n"
        f"  brt write {run} --memory {args.out / 'module.memory'} --interactive\n"
        f"  brt serve {run} --memories {args.out / 'memories'}   (then open http://127.0.0.1:8000 and drop a text in)\n"
        f"  brt inspect {run} {module.path} --out {args.out / 'memory.html'}\n"
        f"  brt data prepare YOUR-FOLDER --out build/mine && brt train --system {SYSTEMS[0]} --size tiny "
        "--data build/mine --out runs/mine"
    )

"""`brt demo`: show in five minutes how much a memory helps, on text that every machine has.

The bundled model reads a text that it was not trained on. Then a small model is trained from scratch, stopped, and
resumed bit for bit. Each `brt` command is printed before it runs. When the demo is rerun, training resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent import models
from block_recurrent.cli.output import (
    add_json,
    check_outputs,
    give_json,
    in_snake_case,
    print_notes,
    size,
    text_of,
)
from block_recurrent.errors import BlockRecurrentError, ConfigError, FileFormatError
from block_recurrent.io.output import print_table, write_file

if TYPE_CHECKING:
    from block_recurrent.studies.demo import Document, Unseen

MARKER = "demo.json"
STOPPED = 130
STEPS, QUICK_STEPS = 200, 6
QUICK_TOKENS = 2000
SYSTEM = "rec-fixed-skip"
DEFINITIONS = (
    "With its memory: the memory covers everything before. State cleared: the recurrent state is reset at each "
    "segment; the window of tokens is kept. With nothing: each window of tokens is read on its own."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="output folder (default: runs/demo, or runs/demo-quick)")
    parser.add_argument("--model", help="the model that reads: a name (see 'brt models') or a run (default: code)")
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 text to read (default: a module of Python's standard library)"
    )
    parser.add_argument(
        "--source", default="stdlib", help="training data of the small model: stdlib, a folder, or a file"
    )
    parser.add_argument("--size", help="size of the small model (default: tiny; with --quick micro)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {STEPS}; with --quick {QUICK_STEPS})")
    parser.add_argument(
        "--quick", action="store_true", help="finish in seconds, with less text and fewer training steps"
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser at the end")
    add_json(parser)


@dataclass
class _Demo:
    """Settings, and the results so far."""

    out: Path
    model: str | None
    text: str | None
    source: str
    size: str
    steps: int
    quick: bool
    found: dict[str, Any] = field(default_factory=dict)
    closing: list[list[str]] = field(default_factory=list)
    step: int = 0

    def say(self, title: str, what: str) -> None:
        self.step += 1
        print(f"\n{self.step}. {title}\n   {what}", flush=True)


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 2:
        raise ConfigError(f"--steps is {args.steps}: it must be at least 2, one before the stop and one after it")
    began = time.monotonic()
    demo = _Demo(
        args.out or Path("runs/demo-quick" if args.quick else "runs/demo"),
        args.model or _default_model(args.text is not None),
        args.text,
        args.source,
        args.size or ("micro" if args.quick else "tiny"),
        args.steps or (QUICK_STEPS if args.quick else STEPS),
        args.quick,
    )
    check_outputs(args, "json")
    _check(demo)
    _claim(demo)
    with text_of(args, is_progress=True):
        if demo.model is None:
            print(
                "This package was built without bundled models (see 'brt models'). The reading part is "
                "skipped; a model is trained from scratch."
            )
        else:
            _reading(demo)
        _training(demo)
        _close(demo, time.monotonic() - began, args.open)
    give_json(args, in_snake_case(demo.found))
    return 0


def _default_model(has_text: bool) -> str | None:
    there = models.names()
    wanted = ("books", "code") if has_text else ("code", "books")
    return next((name for name in wanted if name in there), there[0] if there else None)


def _check(demo: _Demo) -> None:
    """Finds wrong settings before the work begins, and before the folder keeps them."""
    from block_recurrent.checkpoint import read_config
    from block_recurrent.data.sources import find_documents
    from block_recurrent.presets import preset
    from block_recurrent.studies.demo import given_text

    preset(SYSTEM, demo.size)
    find_documents(demo.source)
    if demo.model is not None:
        read_config(models.locate(demo.model)[0])
    if demo.text is not None:
        given_text(demo.text)


def _claim(demo: _Demo) -> None:
    """Accept the folder if it is empty, or if it was made by the same command."""
    values = {key: getattr(demo, key) for key in ("model", "text", "source", "size", "steps", "quick")}
    path = demo.out / MARKER
    if path.is_file():
        try:
            before = json.loads(path.read_bytes())["settings"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FileFormatError(f"'{path}' is corrupt: remove '{demo.out}', or choose another --out") from None
        if before != values:
            raise ConfigError(f"'{demo.out}' contains a demo with other settings: choose another --out, or remove it")
    elif demo.out.exists() and (not demo.out.is_dir() or any(demo.out.iterdir())):
        raise ConfigError(f"'{demo.out}' exists and is not a demo folder: choose another --out")
    _save(demo, values)


def _save(demo: _Demo, values: dict[str, Any] | None = None) -> None:
    values = values or json.loads((demo.out / MARKER).read_bytes())["settings"]
    text = json.dumps({"settings": values, "found": demo.found}, indent=1, ensure_ascii=False)
    write_file(demo.out / MARKER, text + "\n", make_folder=True)


def _reading(demo: _Demo) -> None:
    from block_recurrent.checkpoint import load_run
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.studies.demo import given_text, read_unseen, unseen_modules

    assert demo.model is not None
    texts = [given_text(demo.text)] if demo.text else unseen_modules(demo.model)
    loaded = load_run(demo.model)
    print_notes(loaded.notes)
    limit = QUICK_TOKENS if demo.quick else None
    demo.say(
        f"'{demo.model}' reads {texts[0].name}, which it has never seen",
        "It reads the text once, from beginning to end, into a memory whose size never changes.",
    )
    with shown_progress("reading") as progress:
        document = read_unseen(loaded, texts[0], limit, progress)
    places = document.reading.sizes
    shown = [places[0], places[len(places) // 2], places[-1]]
    print_table(["tokens read", "memory"], [[f"{tokens:,}", size(count)] for tokens, count in shown])
    count = len(document.reading.tokens)
    print(f"{count:,} tokens in {document.seconds:.1f} s ({count / document.seconds:,.0f} tokens/s)")
    demo.found |= {
        "document": document.name,
        "definitions": DEFINITIONS,
        "memory_bytes": places[-1][1],
        "tokens": count,
    }
    demo.closing += [
        ["tokens read", f"{count:,}"],
        ["bytes of memory, at the start and at the end", f"{places[-1][1]:,}"],
    ]
    _scoring(demo, document)
    _writing(demo, document, texts[1] if len(texts) > 1 else None)


def _scoring(demo: _Demo, document: Document) -> None:
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.studies.demo import worth_of
    from block_recurrent.studies.memory_worth import MEMORY

    demo.say("The second half, scored in three ways", DEFINITIONS)
    with shown_progress("scoring") as progress:
        worth = worth_of(document, progress)
    mine = worth["bits_per_token"][MEMORY]
    rows = [
        [way, f"{bits:.4f}", f"{worth['bits_per_byte'][way]:.4f}", f"{bits - mine:+.4f}"]
        for way, bits in worth["bits_per_token"].items()
    ]
    print_table([f"{worth['tokens']:,} tokens", "bits per token", "bits per byte", "extra bits per token"], rows)
    demo.closing += [[f"bits per token, {way}", f"{bits:.3f}"] for way, bits in worth["bits_per_token"].items()]
    demo.found["worth"] = worth
    demo.say(
        "Words that the memory helped to predict",
        f"Each last occurred more than {document.engine.config.window} tokens before: outside the window.",
    )
    words = [
        [
            w["word"],
            f"{w['chance']:.0%}",
            f"{w['chance_cleared']:.1%}",
            f"{w['distance']:,}",
            " ".join(w["before"].split())[-40:],
        ]
        for w in worth["words"]
    ]
    print_table(["word", "probability", "state cleared", "last seen, tokens ago", "context"], words)
    demo.closing.append(["words predicted from beyond the window (shown above)", str(len(words))])


def _writing(demo: _Demo, document: Document, other: Unseen | None) -> None:
    from block_recurrent.inference.session import Session
    from block_recurrent.studies.demo import OTHER_BYTES, memory_hash, write_from

    length = 16 if demo.quick else 80
    prompt = "\n\n" if demo.text else "\n\ndef "
    here, elsewhere = document.session(), Session(document.engine, document.loaded.tokenizer)
    if other is not None:
        elsewhere.read(other.text[: 600 if demo.quick else OTHER_BYTES])
    name = other.name if other is not None else "nothing"
    demo.say(
        "One prompt, two memories",
        f"Both start with {prompt!r} and the same random seed; only the text they read differs.",
    )
    written = [[f"memory of {document.name}", write_from(here, prompt, length, 1)]]
    written.append([f"memory of {name}", write_from(elsewhere, prompt, length, 1)])
    _print_texts(written)
    demo.say("A fork costs nothing", "A memory is a value: two continuations from one memory, which is unchanged.")
    before = memory_hash(here)
    forks = [[f"fork {seed}", write_from(here, prompt, length // 2, seed)] for seed in (2, 3)]
    _print_texts(forks)
    print(f"hash of the memory before and after: {before[:16]} {memory_hash(here)[:16]}")
    document.session(at_end=True).save(demo.out / "document.memory")
    demo.found["written"] = written + forks


def _print_texts(texts: list[list[str]]) -> None:
    for name, text in texts:
        print(f"--- {name}")
        print("\n".join(f"    {line}" for line in text.strip("\n").splitlines()), flush=True)


def _training(demo: _Demo) -> None:
    from block_recurrent.studies.demo import run_facts, stopped_at

    demo.say(
        f"A {SYSTEM} of size {demo.size} learns from scratch",
        f"{demo.steps} steps on '{demo.source}' without a stop; then the same run again, stopped halfway and resumed.",
    )
    data, whole, halves = (demo.out / name for name in ("data", "trained", "resumed"))
    if not (data / "manifest.json").is_file():
        _brt("data", "prepare", demo.source, "--out", data, "--tokenizer", "bytes")
    _brt("train", *_recipe(demo, data, whole))
    demo.say("Stopped with Ctrl-C, and resumed", "The interrupted run ends with the same weights, bit for bit.")
    if not list(halves.glob("checkpoints/step-*")):
        with stopped_at(halves, demo.steps // 2):
            _brt("train", *_recipe(demo, data, halves), stops=True)
    _brt("train", *_recipe(demo, data, halves))
    runs = {"uninterrupted": run_facts(whole), "stopped and resumed": run_facts(halves)}
    print_table(
        ["run", "steps", "last loss", "SHA-256 of the weights"],
        [[name, str(f["step"]), repr(f["losses"][-1]), f["weights"][:32]] for name, f in runs.items()],
    )
    first, second = runs.values()
    if (first["weights"], first["losses"]) != (second["weights"], second["losses"]):
        raise BlockRecurrentError("the resumed run differs from the uninterrupted run: please report this")
    demo.found["training"] = {"runs": runs}
    held_out = first["held_out_bits"]
    demo.closing += [
        ["small model, bits per byte at the first step", f"{first['first_bits']:.3f}"],
        [f"the same, held out, after {first['tokens']:,} tokens", "-" if held_out is None else f"{held_out:.3f}"],
        ["weights after stopping and resuming", "the same, bit for bit"],
    ]


def _recipe(demo: _Demo, data: Path, out: Path) -> list[object]:
    """A short run, whose learning rate decays within its own number of steps."""
    settings: dict[str, object] = {
        "optimizer.name": "adamw",
        "schedule.kind": "cosine",
        "schedule.learning_rate": 0.004,
        "schedule.final_learning_rate": 0.0002,
        "schedule.warmup": min(40, demo.steps // 4),
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
    }
    words: list[object] = ["--system", SYSTEM, "--size", demo.size, "--data", data, "--out", out, "--steps", demo.steps]
    words += [
        "--eval-every",
        0,
        "--eval-tokens",
        1024 if demo.quick else 32_768,
        "--save-every",
        max(1, demo.steps // 4),
    ]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words


def _brt(*words: object, stops: bool = False) -> None:
    """Print a `brt` command, and run it."""
    from block_recurrent.cli.main import dispatch

    command = [str(word) for word in words]
    print(f"$ brt {shlex.join(command)}", flush=True)
    if dispatch(command) not in ((0, STOPPED) if stops else (0,)):
        raise BlockRecurrentError("the demo was stopped; rerun it to resume")


def _close(demo: _Demo, seconds: float, opens: bool) -> None:
    from block_recurrent.studies.demo_page import write_demo_page

    page = demo.out / "report.html"
    demo.found |= {"closing": demo.closing, "subtitle": f"brt demo, {seconds / 60:.1f} minutes"}
    write_demo_page(page, demo.found)
    _save(demo)
    print(f"\nDone in {seconds / 60:.1f} minutes.\n")
    print_table(["summary", ""], demo.closing)
    print(f"\nThe report:  {page}  (open it in a browser)\n\nTry next:")
    if demo.model is not None:
        memory = demo.out / "document.memory"
        print(f"  brt write {demo.model} --memory {memory} --interactive")
        print(f"  brt serve {demo.model} --memories {demo.out / 'memories'}   (a web page to upload texts to)")
        print(f"  brt data prepare YOUR-FOLDER --out build/mine --tokenizer {demo.model}")
        print(f"  brt train --init-from {demo.model} --data build/mine --out runs/mine")
    else:
        print(f"  brt write {demo.out / 'trained'} --prompt 'def ' --tokens 200")
        print("  brt data prepare YOUR-FOLDER --out build/mine")
        print(f"  brt train --system {SYSTEM} --size tiny --data build/mine --out runs/mine")
    if opens:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())

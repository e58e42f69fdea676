"""`brt demo`: show in five minutes how much a memory helps, on text that every machine has.

The bundled model reads a text that it was not trained on. Then a small model is trained from scratch, stopped, and
resumed bit for bit. Each `brt` command is printed before it runs. When the demo is rerun, training resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

from block_recurrent import models
from block_recurrent.cli.demo_reading import Demo, read_and_generate, seen
from block_recurrent.cli.output import add_json, check_outputs, give_json, in_snake_case, text_of
from block_recurrent.errors import INTERRUPTED, BlockRecurrentError, ConfigError, FileFormatError
from block_recurrent.io.output import print_table, write_file

MARKER = "demo.json"
STEPS, QUICK_STEPS = 200, 6
SYSTEM = "rec-fixed-skip"


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


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 2:
        raise ConfigError(f"--steps is {args.steps}: it must be at least 2, one before the stop and one after it")
    began = time.monotonic()
    demo = Demo(
        args.out or Path("runs/demo-quick" if args.quick else "runs/demo"),
        args.model or _default_model(args.text is not None),
        args.text,
        args.source,
        args.size or ("micro" if args.quick else "tiny"),
        args.steps or (QUICK_STEPS if args.quick else STEPS),
        args.quick,
    )
    check_outputs(args, "json", beside=demo.out)
    _check(demo)
    _claim(demo)
    with text_of(args, is_progress=True):
        if demo.model is None:
            print(
                "This package was built without bundled models (see 'brt models'). The reading part is "
                "skipped; a model is trained from scratch."
            )
        else:
            read_and_generate(demo)
        _training(demo)
        _close(demo, time.monotonic() - began, args.open)
    give_json(args, in_snake_case(demo.found))
    return 0


def _default_model(has_text: bool) -> str | None:
    there = models.names()
    wanted = ("books", "code") if has_text else ("code", "books")
    return next((name for name in wanted if name in there), there[0] if there else None)


def _check(demo: Demo) -> None:
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


def _claim(demo: Demo) -> None:
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


def _save(demo: Demo, values: dict[str, Any] | None = None) -> None:
    values = values or json.loads((demo.out / MARKER).read_bytes())["settings"]
    text = json.dumps({"settings": values, "found": demo.found}, indent=1, ensure_ascii=False)
    write_file(demo.out / MARKER, text + "\n", make_folder=True)


def _training(demo: Demo) -> None:
    from block_recurrent.studies.demo import run_facts, stopped_at

    demo.say(
        f"A {SYSTEM} of size {demo.size} learns from scratch",
        f"{demo.steps} steps on '{demo.source}', one token per byte; uninterrupted at first.",
    )
    data, whole, halves = (demo.out / name for name in ("data", "trained", "resumed"))
    if not (data / "manifest.json").is_file():
        _brt("data", "prepare", demo.source, "--out", data, "--tokenizer", "bytes")
    _brt("train", *_recipe(demo, data, whole))
    first = run_facts(whole)
    before = f"{first['first_bits']:.2f} bits per byte at the first step"
    after = None if first["held_out_bits"] is None else f"{first['held_out_bits']:.2f} on held-out text"
    seen(f"{before}, {after or 'not measured'} after {first['step']} steps, {first['tokens']:,} bytes.")
    demo.say("Stopped with Ctrl-C, and resumed", "The same run again; its losses and weights must be the same.")
    if not list(halves.glob("checkpoints/step-*")):
        with stopped_at(halves, demo.steps // 2):
            _brt("train", *_recipe(demo, data, halves), stops=True)
    _brt("train", *_recipe(demo, data, halves))
    second = run_facts(halves)
    runs = {"uninterrupted": first, "stopped and resumed": second}
    print_table(
        ["run", "steps", "last loss", "SHA-256 of the weights"],
        [[name, str(f["step"]), repr(f["losses"][-1]), f["weights"][:32]] for name, f in runs.items()],
    )
    if (first["weights"], first["losses"]) != (second["weights"], second["losses"]):
        raise BlockRecurrentError("the resumed run differs from the uninterrupted run: please report this")
    seen("All losses and all weights are equal, bit for bit.")
    demo.found["training"] = {"runs": runs}
    demo.closing += [
        ["small model, from scratch", ", ".join(filter(None, [before, after]))],
        ["the same run, stopped and resumed", "the same weights, bit for bit"],
    ]


def _recipe(demo: Demo, data: Path, out: Path) -> list[object]:
    """The arguments of `brt train`: the recipe of the size, with one validation at the end."""
    words: list[object] = ["--system", SYSTEM, "--size", demo.size, "--data", data, "--out", out, "--steps", demo.steps]
    words += ["--eval-every", 0, "--eval-tokens", 1024 if demo.quick else 32_768]
    return [*words, "--save-every", max(1, demo.steps // 4)]


def _brt(*words: object, stops: bool = False) -> None:
    """Print a `brt` command, and run it."""
    from block_recurrent.cli.main import dispatch

    command = [str(word) for word in words]
    print(f"$ brt {shlex.join(command)}", flush=True)
    if dispatch(command) not in ((0, INTERRUPTED) if stops else (0,)):
        raise BlockRecurrentError("the demo was stopped; rerun it to resume")


def _close(demo: Demo, seconds: float, opens: bool) -> None:
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

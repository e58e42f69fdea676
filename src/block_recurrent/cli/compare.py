"""`brt compare`: compare two runs, or one run with and without its memory, token by token, and write a report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.eval import add_scoring_arguments, load
from block_recurrent.cli.output import add_json, check_outputs, check_range, give_json, in_snake_case, text_of
from block_recurrent.errors import ConfigError, DataError

if TYPE_CHECKING:
    from block_recurrent.analysis.comparison import Comparison, Reading
    from block_recurrent.analysis.report import Side
    from block_recurrent.checkpoint import LoadedRun
    from block_recurrent.data import Corpus

INSPECTED_TOKENS = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a run, or a model name (see 'brt models')")
    parser.add_argument("b", metavar="B", nargs="?", help="another run; omit it for an experiment on the state of A")
    states = parser.add_mutually_exclusive_group()
    states.add_argument(
        "--clear-state", action="store_true", help="compare A with itself, the state reset at each segment"
    )
    states.add_argument(
        "--freeze-state", action="store_true", help="the same, with the state not updated after the first segment"
    )
    states.add_argument(
        "--swap-state", metavar="DOCUMENT", help="the same, with the final state of this other document at each segment"
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="a prepared folder")
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument(
        "--document", action="append", default=[], metavar="NAME", help="only this document (repeatable)"
    )
    parser.add_argument("--out", required=True, metavar="REPORT", type=Path, help="output folder of the report")
    parser.add_argument("--top", type=int, default=40, metavar="K", help="number of tokens in each table")
    parser.add_argument("--no-inspect", action="store_true", help="skip the inspection of A's memory")
    parser.add_argument("--no-png", action="store_true", help="skip PNG plots (which need the extra 'plots')")
    add_json(parser)
    add_scoring_arguments(parser)


def run(args: argparse.Namespace) -> int:
    experiment = args.clear_state or args.freeze_state or args.swap_state is not None
    if bool(args.b) == bool(experiment):
        raise ConfigError(
            "give a second run B to compare A with, or one of --clear-state, --freeze-state, --swap-state, not both"
        )
    for name in ("top", "lanes", *(["chunk"] if args.chunk is not None else [])):
        check_range(args, name, 1)
    check_outputs(args, "json", beside=args.out)
    _check_folder(args.out, args.overwrite, not args.no_png)
    from block_recurrent.analysis.comparison import compare
    from block_recurrent.analysis.memory_report import inspection_numbers, inspection_page_data
    from block_recurrent.analysis.report import ReportData, report_numbers, write_report
    from block_recurrent.data import Corpus
    from block_recurrent.io.progress import shown_progress

    corpus = Corpus(args.data)
    loaded_a = load(args.a, args)
    loaded_b = load(args.b, args) if args.b else loaded_a
    _check_tokenizers(loaded_a, loaded_b, corpus, args)
    reading_a, reading_b, about_b, chosen = _readings(loaded_a, loaded_b, corpus, args)
    _make_folder(args.out)
    with shown_progress("scoring both models") as progress:
        found = compare(
            reading_a,
            reading_b,
            corpus,
            args.split,
            chosen,
            args.top,
            lanes=args.lanes,
            chunk=args.chunk,
            progress=progress,
        )
    side_a = _side(reading_a.label, args.a, loaded_a, "as trained")
    side_b = _side(reading_b.label, args.b or args.a, loaded_b, about_b)
    numbers, pages, inspections = [], [], []
    if loaded_a.model.config.recurrent_layers and not args.no_inspect:
        name, text = found.documents[0].name, found.documents[0].text
        inspection, taken = inspect_document(loaded_a, name, text.tokens[:INSPECTED_TOKENS])
        numbers, pages = [inspection_numbers(inspection, taken)], [inspection_page_data(inspection, taken, text)]
        inspections = [inspection]
    title = f"{reading_a.label} against {reading_b.label}"
    subtitle = f"split '{args.split}' of {corpus.folder.name}: {found.total_a.tokens:,} tokens"
    data = ReportData(title, subtitle, found, side_a, side_b, numbers, pages)
    write_report(args.out, data)
    with text_of(args):
        _print(found, args.out)
        if not args.no_png:
            _write_pictures(args.out, found, inspections)
    result = report_numbers(data)
    give_json(args, {**result, "definitions": in_snake_case(result["definitions"])})
    return 0


def _check_folder(out: Path, overwrite: bool, with_plots: bool) -> None:
    for path in (out / "report.html", out / "report.json", *(sorted(out.glob("*.png")) if with_plots else ())):
        if path.exists() and not overwrite:
            raise ConfigError(f"'{path}' exists: give --overwrite to replace it, or another --out")
    if out.exists() and not out.is_dir():
        raise DataError(f"--out '{out}' can't be created: it is not a folder")


def _make_folder(out: Path) -> None:
    """Before the scoring, which takes long, and after everything else was found to be valid."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out '{out}' can't be created: {error.strerror or error}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise DataError(f"directory '{out}' is not writable")


def _check_tokenizers(a: LoadedRun, b: LoadedRun, corpus: Corpus, args: argparse.Namespace) -> None:
    from block_recurrent.evaluate.evaluation import check_tokenizer

    if a.tokenizer.sha256 != b.tokenizer.sha256:
        raise ConfigError(
            f"'{args.a}' and '{args.b}' have different tokenizers ({a.tokenizer.size} and {b.tokenizer.size} pieces): "
            "their tokens are not the same pieces of text, so their losses can't be compared token by token; "
            "'brt eval' compares them by bits per byte and word-level perplexity"
        )
    check_tokenizer(a.tokenizer.sha256, corpus, args.a)


def _readings(
    a: LoadedRun, b: LoadedRun, corpus: Corpus, args: argparse.Namespace
) -> tuple[Reading, Reading, str, list[int]]:
    """The two readings to compare, a description of the second, and the documents."""
    from block_recurrent.analysis.comparison import Reading
    from block_recurrent.evaluate.evaluation import choose_documents
    from block_recurrent.evaluate.state_edits import ReplaceState, clear_every, freeze_after_first_segment

    chosen = choose_documents(corpus, args.split, tuple(args.document))
    if args.b:
        labels = _labels(args.a, args.b, a, b)
        return Reading(labels[0], a.model), Reading(labels[1], b.model), "as trained", chosen
    segment = a.model.config.segment
    normal = Reading(_name(args.a, a), a.model)
    if args.clear_state:
        edit, label, about = clear_every(a.model, segment), "state cleared", f"state reset every {segment} tokens"
        return normal, Reading(label, a.model, edit), about, chosen
    if args.freeze_state:
        about = f"state not updated after the first {segment} tokens"
        return normal, Reading("state frozen", a.model, freeze_after_first_segment(a.model)), about, chosen
    split, index = corpus.find(args.swap_state)
    chosen = [i for i in chosen if (split, i) != (args.split, index)]
    if not chosen:
        raise ConfigError(f"--swap-state '{args.swap_state}': it must not be one of the documents being scored")
    swap = ReplaceState(segment, _left_by(a, corpus, split, index))
    about = f"state replaced by the final state of '{args.swap_state}' every {segment} tokens"
    return normal, Reading("state swapped", a.model, swap), about, chosen


def _left_by(loaded: LoadedRun, corpus: Corpus, split: str, index: int) -> Any:
    import numpy as np

    from block_recurrent.evaluate.state_edits import states_after

    tokens = np.concatenate([[corpus.eos_token_id], corpus.tokens(split, index)]).astype(np.int64)
    return states_after(loaded.model, tokens)


def _name(run: str, loaded: LoadedRun) -> str:
    return loaded.config.system or Path(run).name


def _labels(run_a: str, run_b: str, a: LoadedRun, b: LoadedRun) -> tuple[str, str]:
    """The names of the systems, or of the folders if both runs have the same system."""
    names = (_name(run_a, a), _name(run_b, b))
    if names[0] == names[1]:
        names = (Path(run_a).name, Path(run_b).name)
    return names if names[0] != names[1] else (run_a, run_b)


def _side(label: str, run: str, loaded: LoadedRun, about: str) -> Side:
    from block_recurrent.analysis.report import Side

    values = loaded.config.to_dict()
    flat = {"system": values["system"], "size": values["size"]}
    for section in ("model", "train", "optimizer", "schedule"):
        flat |= {f"{section}.{key}": value for key, value in values[section].items()}
    return Side(label, f"run {Path(run).name}, step {loaded.checkpoint.step}; {about}", flat)


def inspect_document(loaded: LoadedRun, name: str, tokens: Any, with_ablation: bool = True) -> tuple[Any, list[Any]]:
    """Inspect a document, with an ablation of its state vectors."""
    from block_recurrent.analysis.ablation import ablate
    from block_recurrent.analysis.inspector import inspect
    from block_recurrent.io.progress import shown_progress

    with shown_progress("inspecting the memory") as progress:
        inspection = inspect(loaded.model, tokens, name, progress)
    with shown_progress("ablating state vectors") as progress:
        return inspection, ablate(loaded.model, tokens, inspection, progress) if with_ablation else []


def _print(found: Comparison, out: Path) -> None:
    a, b = found.total_a, found.total_b
    print(f"{found.label_a}: {a.bits_per_token:.4f} bits per token; {found.label_b}: {b.bits_per_token:.4f}")
    print(f"\n  token, bits {found.label_a}, bits {found.label_b}, difference, last mention, where, excerpt")
    for label, tops in ((found.label_a, found.top_a), (found.label_b, found.top_b)):
        print(f"\n{label} is better ({sum(t.proper_name for t in tops)} of {len(tops)} are proper names):")
        for top in tops[:10]:
            distance = "never" if top.distance is None else f"{top.distance:,}"
            excerpt = " ".join(f"{top.before[-40:]}|{top.token}|{top.after[:16]}".split())
            print(
                f"  {top.index:>9,} {top.bits_a:>7.2f} {top.bits_b:>7.2f} {top.difference:>+7.2f}  "
                f"{distance:>7} {top.where:8} {excerpt}"
            )
    left_a, left_b = (headroom.beyond for headroom in found.headroom)
    print(
        f"\na cache of tokens more than {left_a.low:,} back would still save, in bits per token: {found.label_a} "
        f"{left_a.bigram:.4f}, {found.label_b} {left_b.bigram:.4f} (bigram; unigram {left_a.unigram:.4f}, "
        f"{left_b.unigram:.4f})"
    )
    print(f"wrote {out / 'report.html'} and report.json")


def _write_pictures(out: Path, found: Comparison, inspections: list[Any]) -> None:
    from block_recurrent.analysis.plots import has_matplotlib, write_pictures

    if has_matplotlib():
        print(f"wrote {len(write_pictures(out, found, inspections))} plots next to it")
    else:
        print("no plots: they need the extra 'plots' (pip install 'block-recurrent[plots]')")

"""`brt reproduce`: reproduce a table of the paper at a size that this machine can train."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from block_recurrent.cli.output import (
    add_json,
    check_budget,
    check_outputs,
    check_range,
    check_results,
    give_json,
    stopped,
    text_of,
)
from block_recurrent.io.output import markdown, print_table, write_file, write_json
from block_recurrent.presets import SIZES, preset
from block_recurrent.run_config import check_keys, parse_settings
from block_recurrent.studies.paper_tables import TABLES

MOST_SEEDS = 1000
COMPARED = ("rec-fixed-skip", "slide-plus")
NOTE = (
    "All runs use the same documents in the same order, the same tokens and the same recipe. bits per token: of the "
    "test split, memory carried through whole documents. deviation: over seeds. step time: of training, relative to "
    "slide-plus (or the first row). state gain: bits per token saved by carrying the recurrent state, on a "
    "validation batch. paper: the paper's bits per token, for models of 150M parameters trained on PG19."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=TABLES, help="; ".join(f"{name}: {what}" for name, what in TABLES.items()))
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="DIR", help="a prepared folder (several to compare vocabularies)"
    )
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(SIZES)}")
    parser.add_argument(
        "--budget",
        type=float,
        default=20.0,
        metavar="MINUTES",
        help="minutes of training per run, excluding validation and scoring",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per model; more can be added later")
    parser.add_argument(
        "--systems", metavar="A,B", help="only these systems of the table; others can be added later (default: all)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: runs/TABLE-SIZE)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting for all runs (repeatable)"
    )
    parser.add_argument(
        "--no-report", action="store_true", help="skip the token-by-token comparison of the two main systems"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    preset(COMPARED[0], args.size)  # raises an error if the size does not exist
    check_budget(args.budget)
    check_range(args, "seeds", 1, MOST_SEEDS)
    settings = parse_settings(args.set)
    check_keys(settings)
    from block_recurrent.studies.reproduce import Study, reproduce, summary

    out = args.out or Path("runs") / f"{args.table}-{args.size}"
    check_outputs(args, "json", beside=out)
    check_results(out, args.table, {"table", "runs"}, args.overwrite)
    seeds = tuple(range(args.seeds))
    systems = tuple(args.systems.split(",")) if args.systems else ()
    study = Study(args.table, args.size, tuple(args.data), out, args.budget, seeds, settings=settings, systems=systems)
    found = reproduce(study, lambda text: print(f"\n{text}", file=sys.stderr))
    if found is None:
        return stopped()
    with text_of(args, is_progress=True):
        result = _write_results(out, args.table, found, summary(found))
        if not args.no_report:
            _report(args, out, found)
    give_json(args, result)
    return 0


def _write_results(
    out: Path, table: str, found: dict[str, Any], lines: tuple[list[str], list[list[str]]]
) -> dict[str, Any]:
    from block_recurrent.bench.harness import with_origin

    head, rows = lines
    print_table(head, rows)
    print(NOTE)
    result = with_origin(found)
    write_json(out / f"{table}.json", result)
    text = f"`{result['command']}`: {found['steps']} steps per run.\n\n{markdown(head, rows)}\n{NOTE}\n"
    write_file(out / f"{table}.md", text)
    print(f"wrote {table}.json and {table}.md in {out}")
    _curves(out, table, found)
    return result


def _curves(out: Path, table: str, found: dict[str, Any]) -> None:
    """Bits per token by position, of the first seed."""
    from block_recurrent.analysis.plots import cumulative_chart, write_charts
    from block_recurrent.evaluate.cumulative import Curve

    curves = {run["label"]: Curve.from_dict(run["cumulative"]) for run in found["runs"] if run["seed"] == 0}
    write_charts(out / f"{table}-by-position", cumulative_chart(curves))


def _report(args: argparse.Namespace, out: Path, found: dict[str, Any]) -> None:
    """Compare the two main systems token by token, if the table has them."""
    from block_recurrent.cli.main import dispatch

    runs = [out / "runs" / f"{system}-seed0" for system in COMPARED]
    if all(run.is_dir() for run in runs):
        dispatch(["compare", *map(str, runs), "--data", args.data[0], "--out", str(out / "report"), "--overwrite"])

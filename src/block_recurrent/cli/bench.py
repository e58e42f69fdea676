"""`brt bench`: a table of benchmarks, each a module of `block_recurrent.bench`.

A benchmark module has SUMMARY, EXAMPLE, NOTE (how its numbers are defined), `add_arguments(parser)` and `run(args)`,
which returns rows. Heavy imports belong inside `run`.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from block_recurrent.cli.output import add_command, add_json, check_outputs, give_json, in_snake_case
from block_recurrent.io.output import markdown, print_table, write_file

BENCHMARKS = (
    "data",
    "eval",
    "kernels",
    "launches",
    "length",
    "outside",
    "overhead",
    "peers",
    "serve",
    "steptime",
    "triton",
    "versions",
    "write",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="NAME", title="benchmarks")
    for name in BENCHMARKS:
        module = importlib.import_module(f"block_recurrent.bench.{name}")
        sub = add_command(commands, name, module.SUMMARY, module.EXAMPLE, module.NOTE)
        module.add_arguments(sub)
        add_json(sub)
        sub.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as Markdown")
        sub.set_defaults(benchmark=module)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json", "markdown")
    from block_recurrent.bench.harness import with_origin

    result = with_origin({"rows": args.benchmark.run(args)})
    head, rows = _cells(result["rows"])
    machine = result["machine"]
    where = [f"{machine['processor']}, {machine['cores']} cores", *map(" ".join, result["versions"].items())]
    if args.json != "-":
        print_table(head, rows)
        print(args.benchmark.NOTE)
        print("; ".join(where))
    give_json(args, {**result, "rows": [in_snake_case(row) for row in result["rows"]]})
    if args.markdown:
        text = f"`{result['command']}`\n\n{markdown(head, rows)}\n{args.benchmark.NOTE}\n\nOn {'; '.join(where)}.\n"
        write_file(args.markdown, text)
    return 0


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return list(rows[0]), [["" if value is None else str(value) for value in row.values()] for row in rows]

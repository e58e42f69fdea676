"""`brt bench`: a table of benchmarks, each a module of `block_recurrent.bench`.

A benchmark module has SUMMARY, EXAMPLE, NOTE (how its numbers are defined), `add_arguments(parser)` and `run(args)`,
which returns rows. It imports what is heavy inside `run`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from block_recurrent.errors import BlockRecurrentError

BENCHMARKS = ("data", "length", "peers", "steptime", "write")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="NAME", title="benchmarks")
    for name in BENCHMARKS:
        module = importlib.import_module(f"block_recurrent.bench.{name}")
        sub = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY}. {module.NOTE}",
            epilog=f"example: {module.EXAMPLE}",
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write rows, machine and versions as JSON")
        sub.set_defaults(benchmark=module)


def run(args: argparse.Namespace) -> int:
    from block_recurrent.bench.harness import report

    result = report(args.benchmark.run(args), shlex.join(["brt", *sys.argv[1:]]))
    _print_rows(result["rows"])
    machine, versions = result["machine"], result["versions"]
    print(args.benchmark.NOTE)
    print(
        f"{machine['processor']}, {machine['cores']} cores; " + ", ".join(" ".join(pair) for pair in versions.items())
    )
    if args.json:
        try:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BlockRecurrentError(f"can't write '{args.json}': {error.strerror}") from None
    return 0


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))

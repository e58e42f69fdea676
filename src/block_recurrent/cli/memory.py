"""`brt memory`: what is in a memory file, and how far two are apart."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    info = commands.add_parser("info", help="whose memory it is, and of what text", allow_abbrev=False)
    info.add_argument("file", help="a memory file")
    info.add_argument("--text", metavar="FILE", help="also say whether this is the text that was read")
    info.add_argument("--json", action="store_true", help="print JSON")
    diff = commands.add_parser("diff", help="how far two memories are apart, per layer", allow_abbrev=False)
    diff.add_argument("a", help="a memory file")
    diff.add_argument("b", help="another, of the same model")
    diff.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    return _info(args) if args.command == "info" else _diff(args)


def _info(args: argparse.Namespace) -> int:
    from block_recurrent.inference.session_file import describe, read_memory_file

    file = read_memory_file(args.file)
    facts = describe(file)
    if args.text:
        facts["is memory of the text"] = _hash_of(args.text) == file.text_hash
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        print(f"{name:{width}}  {shown}")
    return 0


def _hash_of(path: str) -> str:
    from block_recurrent.inference.text_hash import TextHash
    from block_recurrent.inference.text_input import read_text

    found = TextHash()
    for piece in read_text(path):
        found = found.update(piece.encode())
    return found.hexdigest()


def _diff(args: argparse.Namespace) -> int:
    from block_recurrent.inference.memory_diff import difference
    from block_recurrent.inference.session_file import read_memory_file

    a, b = read_memory_file(args.a), read_memory_file(args.b)
    rows = difference(a, b)
    if args.json:
        facts = {"tokens": [a.tokens, b.tokens], "same_text": a.text_hash == b.text_hash}
        print(json.dumps(facts | {"layers": [asdict(row) for row in rows]}, indent=1))
        return 0
    print(f"{a.tokens:,} and {b.tokens:,} tokens; the texts are {'' if a.text_hash == b.text_hash else 'not '}the same")
    print(f"{'layer':>5}  {'what':14} {'largest':>10} {'relative':>10} {'cosine':>8}")
    for row in rows:
        print(f"{row.layer:>5}  {row.what:14} {row.largest:>10.3g} {row.relative:>10.3g} {row.cosine:>8.4f}")
    return 0

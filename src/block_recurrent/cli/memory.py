"""`brt memory`: inspect, compare and rewind memory files."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from block_recurrent.cli.output import add_command, add_json, check_outputs, give_json, text_of
from block_recurrent.errors import ConfigError, FileFormatError
from block_recurrent.io.output import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", title="commands")
    example = "brt memory info book.memory --text book.txt"
    info = add_command(commands, "info", "print the model and text that a memory belongs to", example)
    info.add_argument("file", metavar="MEMORY", help="a memory file")
    info.add_argument(
        "--text",
        metavar="FILE",
        help="also check that this is the text that was read (- for standard input); exit code 1 if not",
    )
    add_json(info)
    example = "brt memory diff book.memory after.memory"
    diff = add_command(commands, "diff", "print the distance between two memories, per layer", example)
    diff.add_argument("a", metavar="A", help="a memory file")
    diff.add_argument("b", metavar="B", help="another memory file of the same model")
    add_json(diff)
    example = "brt memory rewind book.memory --to 65536 --out earlier.memory"
    rewind = add_command(commands, "rewind", "restore a memory from a checkpoint of its trail", example)
    rewind.add_argument("file", metavar="MEMORY", help="a memory file")
    rewind.add_argument(
        "--to",
        type=int,
        metavar="POSITION",
        help="position of the checkpoint, in tokens (default: list the checkpoints)",
    )
    rewind.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the restored memory here (default: replace the file, with --overwrite)",
    )
    add_json(rewind)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json", "out")
    return {"info": _info, "diff": _diff, "rewind": _rewind}[args.command](args)


def _info(args: argparse.Namespace) -> int:
    from block_recurrent.inference.session_file import describe, read_memory_file

    file = read_memory_file(args.file)
    facts = describe(file)
    if args.text:
        facts["is_memory_of_text"] = _hash_of(args.text) == file.text_hash
    give_json(args, facts)
    width = max(map(len, facts))
    for name, value in facts.items() if args.json != "-" else ():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        print(f"{name.replace('_', ' '):{width}}  {shown}")
    if args.text and not facts["is_memory_of_text"]:
        raise FileFormatError(f"'{args.file}' is not the memory of '{args.text}'")
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
    facts = {"tokens": [a.tokens, b.tokens], "same_text": a.text_hash == b.text_hash}
    give_json(args, facts | {"layers": [asdict(row) for row in rows]})
    if args.json == "-":
        return 0
    print(f"{a.tokens:,} and {b.tokens:,} tokens; the texts are {'' if a.text_hash == b.text_hash else 'not '}the same")
    numbers = ([str(r.layer), r.what, f"{r.largest:.3g}", f"{r.relative:.3g}", f"{r.cosine:.4f}"] for r in rows)
    print_table(["layer", "what", "largest", "relative", "cosine"], numbers)
    return 0


def _rewind(args: argparse.Namespace) -> int:
    from block_recurrent.inference.trail import Trail, locked, places_of, rewind

    path = Path(args.file)
    if args.to is not None and args.out is None and not args.overwrite and path.exists():
        raise ConfigError(f"'{path}' exists: give --overwrite to replace it, or --out FILE")
    places = places_of(path)
    missing = f"'{path}' has no checkpoints: 'brt read --trail N' keeps one every --trail-every tokens"
    if args.to is None:
        with text_of(args):
            print("\n".join(f"{place.position:>12,}" for place in places) or missing)
        give_json(args, {"checkpoints": [place.position for place in places]})
        return 0
    if not places:
        raise FileFormatError(missing)
    Trail(places).at(args.to)  # before anything is written
    with locked(path.parent):
        rewind(path, args.to, args.out or path)
    with text_of(args):
        print(f"'{args.out or path}' was rewound to {args.to:,} tokens")
    give_json(args, {"memory": str(args.out or path), "tokens": args.to})
    return 0

"""`brt models`: list the bundled models, show their cards, and pack a run as one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from block_recurrent.cli.output import add_command, add_json, check_outputs, give_json, print_notes, size, text_of
from block_recurrent.errors import ConfigError
from block_recurrent.io.output import print_table

EVALUATIONS = {
    "memory": "JSON of 'brt eval' on held-out documents",
    "cleared": "the same with --clear-every SEGMENT",
    "twin": "JSON of 'brt eval' on the same documents, for a twin without recurrence of equal cost and tokens",
    "headroom": "JSON of 'brt headroom'",
    "needle": "JSON object with recall by distance",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_list)
    add_json(parser)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (default: list the models)")
    show = add_command(commands, "show", "print the card of a model", "brt models show code")
    show.add_argument("name", metavar="NAME", help="a name listed by 'brt models', or the folder of a packed model")
    add_json(show)
    show.set_defaults(action=_show)
    what = "pack a run: bfloat16 weights, tokenizer and model card in one folder"
    example = "brt models pack runs/long --name code --out code --about about.toml --memory eval.json"
    pack = add_command(commands, "pack", what, example)
    pack.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or a model name (see 'brt models')")
    pack.add_argument("--name", required=True, help="name of the model")
    pack.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder")
    pack.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    pack.add_argument(
        "--about",
        type=Path,
        metavar="FILE",
        help="TOML: summary, data, licence, command (strings), limits (strings), samples (title and text)",
    )
    pack.add_argument("--data", type=Path, metavar="DIR", help="the prepared data, to list its documents in the card")
    for name, text in EVALUATIONS.items():
        pack.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    pack.add_argument("--most-mb", type=float, default=12.0, metavar="MB", help="maximum size of the folder")
    add_json(pack)
    pack.set_defaults(action=_pack)


def run(args: argparse.Namespace) -> int:
    return args.action(args)


def _list(args: argparse.Namespace) -> int:
    from block_recurrent import models
    from block_recurrent.models.card import read_card

    check_outputs(args, "json")
    cards = {name: read_card(models.ROOM / name) for name in models.names()}
    sizes = {name: sum(path.stat().st_size for path in (models.ROOM / name).iterdir()) for name in cards}
    give_json(args, [{**card, "bytes": sizes[name]} for name, card in cards.items()])
    if args.json == "-":
        return 0
    if not cards:
        print("no bundled models: this package was built without them; 'brt models pack' packs a run as one")
        return 0
    head = ["name", "size", "parameters", "trained on", "license", "bits per byte", "state cleared", "twin"]
    print_table(head, [_row(name, card, sizes[name]) for name, card in cards.items()])
    for name, card in cards.items():
        print(f"{name}: {card['summary']}")
    print("'brt models show NAME' prints the card. A name works wherever a command takes a run or a tokenizer.")
    return 0


def _row(name: str, card: dict[str, Any], count: int) -> list[str]:
    found = card["evaluation"]
    bits = [f"{found[key]['bits_per_byte']:.3f}" if key in found else "-" for key in ("memory", "cleared", "twin")]
    counts = f"{card['model']['parameters'] / 1e6:.1f}M", f"{card['training']['tokens'] / 1e6:,.1f}M tokens"
    return [name, size(count), *counts, card["licence"], *bits]


def _show(args: argparse.Namespace) -> int:
    from block_recurrent.models.card import card_of, card_text

    check_outputs(args, "json")
    card = card_of(args.name)
    give_json(args, card)
    if args.json != "-":
        print(card_text(card))
    return 0


def _pack(args: argparse.Namespace) -> int:
    if not args.name.replace("-", "").isalnum():
        raise ConfigError(f"--name is '{args.name}': letters, digits and dashes only, not a path")
    check_outputs(args, "json", beside=args.out)
    if args.out.exists() and not args.overwrite:
        raise ConfigError(f"'{args.out}' exists: give --overwrite to replace it, or another --out")
    from block_recurrent.checkpoint import load_run
    from block_recurrent.checkpoint.pack import pack
    from block_recurrent.models import locate
    from block_recurrent.studies.model_card import make_card

    loaded = load_run(args.run, args.checkpoint)
    print_notes(loaded.notes)
    files = {name: path for name in EVALUATIONS if (path := getattr(args, name)) is not None}
    card = make_card(args.name, loaded, locate(args.run)[0], args.about, args.data, files)
    count = pack(loaded, card, args.out, round(args.most_mb * 1e6))
    with text_of(args):
        print(f"step {loaded.checkpoint.step} of '{args.run}' was written to '{args.out}' ({size(count)})")
    give_json(args, {"run": args.run, "step": loaded.checkpoint.step, "out": str(args.out), "bytes": count})
    return 0

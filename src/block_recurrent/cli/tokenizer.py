"""`brt tokenizer`: train a tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from block_recurrent.cli.data import SOURCES, add_shares, add_unit
from block_recurrent.cli.output import add_command, add_json, check_outputs, give_json, text_of
from block_recurrent.io.atomic import made_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    what = "train a lossless SentencePiece tokenizer (BPE)"
    example = "brt tokenizer train --vocab-size 8000 --out books.model books/"
    train = add_command(commands, "train", what, example)
    train.add_argument("sources", nargs="+", metavar="SOURCE", help=SOURCES)
    train.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of pieces, from 512 to 131072"
    )
    train.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file")
    add_json(train)
    add_unit(train)
    add_shares(train)


def run(args: argparse.Namespace) -> int:
    with made_folder(args.out.parent):
        check_outputs(args, "out", "json")
        from block_recurrent.data.tokenizers.training import save_tokenizer, train_tokenizer

        tokenizer = train_tokenizer(args.sources, args.vocab_size, args.unit, args.validation, args.test)
        save_tokenizer(tokenizer, args.out)
    with text_of(args):
        print(f"{args.out}: {tokenizer.size} pieces; vocabulary size with eos: {tokenizer.vocab_size}")
    facts = {"file": str(args.out), "pieces": tokenizer.size, "vocabulary_size": tokenizer.vocab_size}
    give_json(args, facts | {"sha256": tokenizer.sha256})
    return 0

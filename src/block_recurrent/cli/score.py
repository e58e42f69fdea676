"""`brt score`: score a text, given a memory."""

from __future__ import annotations

import argparse

from block_recurrent.cli.output import add_json, check_outputs, give_json
from block_recurrent.cli.read import add_run_arguments, open_session
from block_recurrent.errors import ConfigError, DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--memory", metavar="FILE", help="the memory to start from (default: an empty memory)")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the UTF-8 text file to score; - for standard input")
    parser.add_argument("--text", dest="text_option", metavar="FILE", help="the text file, as an option")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from block_recurrent.inference.text_input import read_text

    if (args.text is None) == (args.text_option is None):
        raise ConfigError("give one text to score: brt score RUN TEXT")
    check_outputs(args, "json")
    name = args.text_option if args.text is None else args.text
    text = "".join(read_text(name))
    if not text:
        raise DataError(f"'{name}' is empty: there is nothing to score")
    session = open_session(args, args.memory)
    scored = session.score(text)
    result = {
        "bits": scored.bits,
        "tokens": scored.tokens,
        "bytes": scored.bytes,
        "bits_per_token": scored.bits / scored.tokens,
        "bits_per_byte": scored.bits / scored.bytes,
        "position": session.position,
    }
    give_json(args, result)
    if args.json == "-":
        return 0
    print(
        f"{scored.bits:,.2f} bits for {scored.tokens:,} tokens ({scored.bytes:,} bytes): "
        f"{result['bits_per_token']:.4f} bits per token, {result['bits_per_byte']:.4f} bits per byte, "
        f"after {session.position:,} tokens"
    )
    return 0

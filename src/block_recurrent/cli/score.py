"""`brt score`: how well a text is predicted from a memory."""

from __future__ import annotations

import argparse
import json

from block_recurrent.cli.read import add_run_arguments, open_session
from block_recurrent.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--memory", metavar="FILE", help="the memory to start from (default: nothing read)")
    parser.add_argument("--text", required=True, metavar="FILE", help="the UTF-8 text to score")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from block_recurrent.inference.text_input import read_text

    text = "".join(read_text(args.text))
    if not text:
        raise DataError(f"'{args.text}' is empty: there is nothing to score")
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
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"{scored.bits:,.2f} bits for {scored.tokens:,} tokens ({scored.bytes:,} bytes): "
        f"{result['bits_per_token']:.4f} bits per token, {result['bits_per_byte']:.4f} bits per byte, "
        f"after {session.position:,} tokens"
    )
    return 0

"""`brt inspect`: what the recurrent state of a run does while it reads a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.compare import inspect_document
from block_recurrent.cli.output import add_json, check_outputs, give_json, print_notes
from block_recurrent.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from block_recurrent.checkpoint import LoadedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run of a rec- or feedback- system, or a model name (see 'brt models')"
    )
    parser.add_argument(
        "text", metavar="TEXT", help="a text file, or - for standard input; with --data, the name of a document"
    )
    parser.add_argument("--data", metavar="DIR", help="a prepared folder to take the document from")
    parser.add_argument("--tokens", type=int, default=20_000, help="maximum number of tokens to read")
    parser.add_argument("--no-ablation", "--no-removal", action="store_true", help="skip the ablation of state vectors")
    add_json(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write an HTML page to open in a browser")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json", "out")
    if args.out and args.out.suffix.lower() != ".html":
        raise DataError(f"--out '{args.out}': its name must end in .html")
    if args.tokens < 1:
        raise DataError(f"--tokens is {args.tokens}: it must be at least 1")
    from block_recurrent.analysis.memory_report import (
        describe_inspection,
        inspection_numbers,
        inspection_page_data,
        write_inspection_page,
    )
    from block_recurrent.analysis.token_text import TokenText
    from block_recurrent.cli.eval import load
    from block_recurrent.evaluate.state_edits import check_recurrent

    loaded = load(args.run, args)
    check_recurrent(loaded.model.config)
    tokens = _tokens(args, loaded)[: args.tokens]
    if not len(tokens):
        raise DataError(f"'{args.text}' is empty: there is nothing to read")
    text = TokenText(tokens, loaded.tokenizer)
    inspection, taken = inspect_document(loaded, args.text, tokens, not args.no_ablation)
    if args.json != "-":
        print(describe_inspection(inspection, taken, text))
    give_json(args, inspection_numbers(inspection, taken))
    if args.out:
        subtitle = f"run {Path(args.run).name}, step {loaded.checkpoint.step}; {inspection.tokens:,} tokens"
        write_inspection_page(args.out, subtitle, inspection_page_data(inspection, taken, text))
        print_notes([f"wrote {args.out}"])
    return 0


def _tokens(args: argparse.Namespace, loaded: LoadedRun) -> NDArray[Any]:
    """The tokens of a document, or of a file of text."""
    if args.data:
        from block_recurrent.data import Corpus
        from block_recurrent.evaluate.evaluation import check_tokenizer

        corpus = Corpus(args.data)
        check_tokenizer(loaded.tokenizer.sha256, corpus, args.run)
        return corpus.tokens(*corpus.find(args.text))
    from block_recurrent.inference.text_input import read_text

    return loaded.tokenizer.encode("".join(read_text(args.text)))

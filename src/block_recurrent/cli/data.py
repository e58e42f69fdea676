"""`brt data`: prepare, inspect and verify documents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.output import add_command, add_json, check_outputs, give_json, text_of
from block_recurrent.errors import FileFormatError
from block_recurrent.io.output import print_table
from block_recurrent.io.progress import shown_progress

if TYPE_CHECKING:
    from block_recurrent.data import Corpus

WITHOUT = {
    "train": "there is nothing to train on (--validation 0 --test 0 uses all documents for training)",
    "validation": "training will not validate, and will not mark a best checkpoint",
    "test": "'brt eval' and 'brt compare' need another --split",
}
SHOWN = 20  # of each list of warnings; the manifest has all of them
SOURCES = "a file, a folder, stdlib, installed, pypi:NAME==VERSION, pypi:code-100, or hf:NAME"
EXAMPLES = {
    "prepare": "brt data prepare books/ --out build/books --tokenizer bytes",
    "info": "brt data info build/books --segment 4096",
    "show": "brt data show build/books train/ramona.txt",
    "verify": "brt data verify build/books",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def command(name: str, what: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = add_command(commands, name, what, EXAMPLES[name])
        sub.set_defaults(action=action)
        return sub

    sub = command("prepare", "tokenize documents for training and evaluation", _prepare)
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help=SOURCES)
    sub.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder")
    sub.add_argument(
        "--tokenizer", default="bytes", help="bytes, a SentencePiece file, a model name (see 'brt models'), or a run"
    )
    add_unit(sub)
    add_shares(sub)
    sub.add_argument(
        "--strict", action="store_true", help="reject text that is not UTF-8, instead of replacing invalid bytes"
    )
    add_json(sub)
    sub.add_argument("--threads", type=int, help="encoding threads (default: one per processor)")

    sub = command("info", "print documents, tokens, words and bytes of each split", _info)
    sub.add_argument("folder", metavar="DIR", help="a prepared folder")
    sub.add_argument("--segment", type=int, default=4096, help="segment length, to compute the share of padding")
    add_json(sub)

    sub = command("show", "print a prepared document as text", _show)
    sub.add_argument("folder", metavar="DIR", help="a prepared folder")
    sub.add_argument("name", metavar="NAME", help="the document's name, as in manifest.json")

    sub = command("verify", "verify the hashes and the index of a prepared folder", _verify)
    sub.add_argument("folder", metavar="DIR", help="a prepared folder")
    add_json(sub)


def add_unit(parser: argparse.ArgumentParser) -> None:
    """The option that defines what a document is."""
    parser.add_argument(
        "--unit",
        choices=("file", "folder"),
        default="file",
        help="whether each file or each top-level folder is a document",
    )


def add_shares(parser: argparse.ArgumentParser) -> None:
    """The options for the share of held-out documents."""
    parser.add_argument(
        "--validation", type=float, default=0.05, help="share of documents, unless there are split folders"
    )
    parser.add_argument("--test", type=float, default=0.05, help="share of documents, unless there are split folders")


def run(args: argparse.Namespace) -> int:
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def _prepare(args: argparse.Namespace) -> int:
    from block_recurrent.data.corpus.prepare import PrepareSettings, prepare
    from block_recurrent.data.corpus.report import summarize
    from block_recurrent.data.sources import total_size
    from block_recurrent.data.tokenizers.base import load_tokenizer

    check_outputs(args, "json", beside=args.out)
    settings = PrepareSettings(
        tuple(args.sources), args.unit, args.validation, args.test, args.strict, args.overwrite, args.threads
    )
    tokenizer = load_tokenizer(args.tokenizer)
    size = total_size(args.sources)
    with shown_progress("prepare", "bytes") as progress:
        corpus = prepare(settings, tokenizer, args.out, lambda _, done: progress(done, size))
    with text_of(args):
        print(f"prepared {args.out}")
        _print_summary(corpus, segment=4096)
        _print_remarks(corpus)
    give_json(args, {"folder": str(args.out), **summarize(corpus, 4096), "skipped": corpus.left_out})
    return 0


def _info(args: argparse.Namespace) -> int:
    from block_recurrent.data import Corpus
    from block_recurrent.data.corpus.report import summarize

    check_outputs(args, "json")
    corpus = Corpus(args.folder)
    if args.json != "-":
        _print_summary(corpus, args.segment)
    give_json(args, summarize(corpus, args.segment))
    return 0


def _show(args: argparse.Namespace) -> int:
    from block_recurrent.data import Corpus

    corpus = Corpus(args.folder)
    if sys.stdout.isatty():
        print(corpus.text(args.name))
        return 0
    for piece in corpus.text_pieces(*corpus.find(args.name)):
        # Bytes: this keeps line endings and does not depend on the locale's encoding.
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    return 0


def _verify(args: argparse.Namespace) -> int:
    from block_recurrent.data import Corpus
    from block_recurrent.data.corpus.report import problems
    from block_recurrent.data.sources.document import SPLITS

    check_outputs(args, "json")
    corpus = Corpus(args.folder)
    found, count = list(problems(corpus)), sum(len(corpus.documents(split)) for split in SPLITS)
    give_json(args, {"folder": args.folder, "documents": count, "problems": found})
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise FileFormatError(f"'{args.folder}' does not match its manifest: {found[0]}{more}; prepare it again")
    with text_of(args):
        print(f"{args.folder}: {count} documents verified")
    return 0


def _print_summary(corpus: Corpus, segment: int) -> None:
    from block_recurrent.data.corpus.report import summarize

    summary = summarize(corpus, segment)
    columns = ("documents", "tokens", "words", "bytes", "tokens_per_word", "bytes_per_token", "longest", "median")
    heads = [*(column.replace("_per_", "/") for column in columns), f"padding at {segment}"]
    rows = [
        [split, *(_number(numbers[column]) for column in columns), _share(numbers["padding"])]
        for split, numbers in summary["splits"].items()
    ]
    print_table(["", *heads], rows)
    tokenizer = summary["tokenizer"]
    print(f"tokenizer: {tokenizer['kind']}, {tokenizer['size']} pieces; vocabulary size with eos: {corpus.vocab_size}")
    _print_losses(summary["splits"])


def _print_losses(splits: dict[str, Any]) -> None:
    total = {
        key: sum(numbers[key] for numbers in splits.values()) for key in ("lost", "characters", "unknown", "tokens")
    }
    if total["lost"] or total["unknown"]:
        lost, unknown = total["lost"] / total["characters"], total["unknown"] / total["tokens"]
        print(
            f"the tokenizer is not lossless: {total['lost']:,} of {total['characters']:,} characters lost "
            f"({_share(lost)}), {total['unknown']:,} unknown pieces ({_share(unknown)} of tokens)"
        )


def _print_remarks(corpus: Corpus) -> None:
    from block_recurrent.data.sources.document import SPLITS

    shares = {"train": 1, **{split: corpus.manifest["settings"][split] for split in ("validation", "test")}}
    for split in (split for split, share in shares.items() if share and not corpus.documents(split)):
        print(f"warning: split '{split}' has no documents: {WITHOUT[split]}; add documents, or a folder per split")
    documents = [document for split in SPLITS for document in corpus.documents(split)]
    _print_list(
        "not UTF-8, invalid bytes replaced by U+FFFD",
        [f"{d.name}: {d.replaced} places" for d in documents if d.replaced],
    )
    _print_list("NUL characters, kept", [f"{d.name}: {d.nul}" for d in documents if d.nul])
    _print_list("skipped", [f"{left['name']}: {left['reason']}" for left in corpus.left_out])


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title} ({len(lines)}):")
        for line in lines[:SHOWN]:
            print(f"  {line}")
        if len(lines) > SHOWN:
            print(f"  ... and {len(lines) - SHOWN} more, in manifest.json")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4%}" if 0 < value < 0.001 else f"{value:.2%}"

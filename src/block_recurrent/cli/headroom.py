"""`brt headroom`: how much a plain cache of the document would still save, and how much the memory already captures."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.eval import add_scoring_arguments, load
from block_recurrent.cli.output import add_json, check_outputs, give_json, in_snake_case
from block_recurrent.errors import ConfigError
from block_recurrent.io.output import counted, print_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from block_recurrent.evaluate.headroom import Band, Headroom
    from block_recurrent.model.language_model import BlockRecurrentLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or a model name (see 'brt models')")
    parser.add_argument("--data", required=True, metavar="DIR", help="a prepared folder")
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens of the split")
    add_json(parser)
    add_scoring_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}: it must be at least 1")
    check_outputs(args, "json")
    from block_recurrent.data import Corpus
    from block_recurrent.evaluate.evaluation import check_tokenizer, choose_documents
    from block_recurrent.evaluate.headroom import DEFINITIONS, taken

    corpus = Corpus(args.data)
    loaded = load(args.run, args)
    check_tokenizer(loaded.tokenizer.sha256, corpus, args.run)
    documents, left = [], args.max_tokens
    for index in choose_documents(corpus, args.split, ()):
        documents.append(corpus.tokens(args.split, index)[:left])
        left = None if left is None else left - len(documents[-1])
        if left == 0:
            break
    readings = _measure(loaded.model, documents, args)
    recurrent = len(readings) > 1
    facts: dict[str, Any] = {
        "run": args.run,
        "step": loaded.checkpoint.step,
        "data": args.data,
        "split": args.split,
        "documents": len(documents),
        "model": readings[0].to_dict(),
        "state_cleared": readings[1].to_dict() if recurrent else None,
        "taken": taken(*readings) if recurrent else None,
        "definitions": DEFINITIONS,
    }
    if args.json != "-":
        _show(facts, readings)
    give_json(args, {**facts, "definitions": in_snake_case(DEFINITIONS)})
    return 0


def _measure(model: BlockRecurrentLM, documents: list[NDArray[Any]], args: argparse.Namespace) -> list[Headroom]:
    """With the state carried and, if the model has one, with the state cleared at each segment."""
    from block_recurrent.evaluate.headroom import measure_headroom
    from block_recurrent.evaluate.state_edits import clear_every
    from block_recurrent.io.progress import shown_progress

    edits = [None, clear_every(model, model.config.segment)] if model.config.recurrent_layers else [None]
    readings = []
    for edit in edits:
        with shown_progress(f"scoring '{args.split}'{', state cleared' if edit else ''}") as progress:
            readings.append(
                measure_headroom(model, documents, lanes=args.lanes, chunk=args.chunk, edit=edit, progress=progress)
            )
    return readings


def _show(facts: dict[str, Any], readings: list[Headroom]) -> None:
    first = readings[0]
    print(f"{first.tokens:,} tokens, {counted(facts['documents'], 'document')} of split '{facts['split']}'")
    print(f"window {first.window:,} tokens, reach {first.reach:,} (window x layers)")
    alone = "; with the state cleared at each segment: ".join(f"{reading.bits_per_token:.4f}" for reading in readings)
    print(f"the model alone, bits per token: {alone}\n")
    _table("a cache saves, bits per token", [reading.bands() for reading in readings])
    _table("by distance", [reading.by_distance() for reading in readings])
    if facts["taken"]:
        said = ", ".join(f"{kind} {bits:.4f}" for kind, bits in facts["taken"].items())
        print(f"captured by the memory, beyond the reach, bits per token: {said}\n")
    for term, text in facts["definitions"].items():
        print(f"{term}: {text}")


def _table(title: str, columns: list[list[Band]]) -> None:
    """A row per band: what caches save in each reading, and how often they contain the token (the same for all)."""
    head = [title, "unigram", "bigram", "unigram, cleared", "bigram, cleared"][: 1 + 2 * len(columns)]
    rows = [
        [
            bands[0].label,
            *(f"{bits:.4f}" for band in bands for bits in (band.unigram, band.bigram)),
            *(f"{100 * share:.1f}%" for share in (bands[0].unigram_hits, bands[0].bigram_hits)),
        ]
        for bands in zip(*columns, strict=True)
    ]
    print_table([*head, "unigram hits", "bigram hits"], rows)
    print()

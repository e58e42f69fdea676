"""Evaluations as text: metrics with their definitions, a row per document, and a comparison of vocabularies."""

from __future__ import annotations

from typing import Any

from block_recurrent.evaluate.evaluation import Evaluation
from block_recurrent.evaluate.measures import DEFINITIONS, FEW_DOCUMENTS, MEASURES, Score
from block_recurrent.io.output import counted, format_table

WIDEST_NAME = 60
LABELS = {
    "bits_per_token": "bits per token",
    "bits_per_byte": "bits per byte",
    "word_perplexity": "word-level perplexity",
    "tokens_per_word": "tokens per word",
}


def describe(result: Evaluation) -> str:
    """The metrics of a split, each with its interval and definition, and a table of documents."""
    lines = [f"{_counts(result.total)}, {counted(len(result.documents), 'document')} of split '{result.split}'", ""]
    for name, label in LABELS.items():
        value = number(getattr(result.total, name))
        interval = result.intervals.get(name) if name in MEASURES else None
        within = f"[{number(interval[0])}, {number(interval[1])}]" if interval else ""
        lines.append(f"  {label:22} {value:>10}  {within:22} {DEFINITIONS[name]}")
    lines += ["", *notes(result), "", _table(result)]
    return "\n".join(lines)


def notes(result: Evaluation) -> list[str]:
    """Notes about the numbers."""
    count = len(result.documents)
    if count > 1:
        said = "[ ] 95% bootstrap interval over documents, with 10,000 resamples"
        said += f"; warning: {count} documents are too few for a reliable interval" if count < FEW_DOCUMENTS else ""
    else:
        said = "no interval: there is only one document"
    return [
        f"  {said}",
        f"  words: {'separated by white space' if result.words_source == 'white space' else 'published (PG19)'}"
        f"; unknown pieces {_percent(result.unknown_share)} of tokens; "
        f"characters lost in decoding {_percent(result.lost_share)}",
        f"  {result.total.tokens / max(result.seconds, 1e-9):,.0f} tokens/s",
    ]


COLUMNS = {
    "tokens": "tokens",
    "tokens_per_word": "tok/word",
    "bits_per_token": "bits/token",
    "bits_per_byte": "bits/byte",
    "word_perplexity": "word ppl",
}


def _table(result: Evaluation) -> str:
    rows = []
    for score in (*result.documents, result.total):
        name = score.name if len(score.name) <= WIDEST_NAME else "…" + score.name[1 - WIDEST_NAME :]
        rows.append(["all" if score is result.total else name, *_cells(vars_of(score))])
    return format_table(["document", *COLUMNS.values()], rows)


def vars_of(score: Score) -> dict[str, Any]:
    return {name: getattr(score, name) for name in COLUMNS}


def _cells(values: dict[str, Any]) -> list[str]:
    return [f"{values['tokens']:,}", *(number(values[name]) for name in list(COLUMNS)[1:])]


def vocabulary_row(run: str, tokenizer: str, size: int, result: Evaluation) -> dict[str, Any]:
    """A row of the paper's table of vocabularies."""
    return {"run": run, "tokenizer": tokenizer, "vocabulary_size": size, **vars_of(result.total)}


def vocabulary_table(rows: list[dict[str, Any]]) -> str:
    """The paper's table of vocabularies: size, token count, scale factor, bits per token, word-level perplexity."""
    cells = [[row["run"], row["tokenizer"], f"{row['vocabulary_size']:,}", *_cells(row)] for row in rows]
    return format_table(["run", "tokenizer", "size", *COLUMNS.values()], cells)


def number(value: float | None) -> str:
    """Four decimals for small numbers, none for large ones, a dash for none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else (f"{value:,.2f}" if abs(value) < 1e5 else f"{value:.4g}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


def _counts(score: Score) -> str:
    return f"{score.tokens:,} tokens, {score.bytes:,} bytes, {score.words:,} words"

"""Evaluations as text: numbers with their definitions, a row per document, and the vocabularies side by side."""

from __future__ import annotations

from typing import Any

from block_recurrent.evaluate.evaluation import Evaluation
from block_recurrent.evaluate.measures import DEFINITIONS, MEASURES, Score

LABELS = {
    "bits_per_token": "bits per token",
    "bits_per_byte": "bits per byte",
    "word_perplexity": "word-level perplexity",
    "tokens_per_word": "tokens per word",
}


def describe(result: Evaluation) -> str:
    """The measures of a split, each with its interval and definition, and a table of documents."""
    lines = [f"{_counts(result.total)}, {len(result.documents)} documents of split '{result.split}'", ""]
    for name, label in LABELS.items():
        value = number(getattr(result.total, name))
        interval = result.intervals.get(name) if name in MEASURES else None
        within = f"[{number(interval[0])}, {number(interval[1])}]" if interval else ""
        lines.append(f"  {label:22} {value:>10}  {within:22} {DEFINITIONS[name]}")
    lines += ["", *notes(result), "", *_table(result)]
    return "\n".join(lines)


def notes(result: Evaluation) -> list[str]:
    """What the numbers rest on."""
    if len(result.documents) > 1:
        said = "[ ] 95% bootstrap interval over documents: documents drawn anew with replacement, 10,000 times"
    else:
        said = "no interval: it is taken over documents, and there is one only"
    return [
        f"  {said}",
        f"  words: {'those that white space separates' if result.words_source == 'white space' else 'published (PG19)'}"
        f"; unknown pieces {_percent(result.unknown_share)} of tokens; "
        f"characters that decoding does not give back {_percent(result.lost_share)}",
        f"  {result.total.tokens / max(result.seconds, 1e-9):,.0f} tokens/s",
    ]


def _table(result: Evaluation) -> list[str]:
    width = max(8, *(len(document.name) for document in result.documents))
    width = min(width, 60)
    rows = [
        f"{'document':{width}} {'tokens':>11} {'bits/token':>11} {'bits/byte':>10} {'word ppl':>10} {'tok/word':>9}"
    ]
    for s in (*result.documents, result.total):
        name = s.name if len(s.name) <= width else "…" + s.name[1 - width :]
        name = "all" if s is result.total else name
        rows.append(
            f"{name:{width}} {s.tokens:>11,} {number(s.bits_per_token):>11} {number(s.bits_per_byte):>10} "
            f"{number(s.word_perplexity):>10} {number(s.tokens_per_word):>9}"
        )
    return rows


def vocabulary_row(run: str, tokenizer: str, size: int, result: Evaluation) -> dict[str, Any]:
    """A row of the paper's table of vocabularies."""
    whole = result.total
    return {
        "run": run,
        "tokenizer": tokenizer,
        "vocabulary_size": size,
        "tokens": whole.tokens,
        "tokens_per_word": whole.tokens_per_word,
        "bits_per_token": whole.bits_per_token,
        "bits_per_byte": whole.bits_per_byte,
        "word_perplexity": whole.word_perplexity,
    }


def vocabulary_table(rows: list[dict[str, Any]]) -> str:
    """The paper's table of vocabularies: size, token count, scale factor, bits per token, word-level perplexity."""
    width = max(3, *(len(row["run"]) for row in rows))
    lines = [
        f"{'run':{width}} {'tokenizer':13} {'size':>7} {'tokens':>12} {'tok/word':>9} {'bits/token':>11} "
        f"{'bits/byte':>10} {'word ppl':>10}"
    ]
    for row in rows:
        lines.append(
            f"{row['run']:{width}} {row['tokenizer']:13} {row['vocabulary_size']:>7,} {row['tokens']:>12,} "
            f"{number(row['tokens_per_word']):>9} {number(row['bits_per_token']):>11} "
            f"{number(row['bits_per_byte']):>10} {number(row['word_perplexity']):>10}"
        )
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Four decimals for small numbers, none for large ones, a dash for none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else (f"{value:,.2f}" if abs(value) < 1e5 else f"{value:.4g}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


def _counts(score: Score) -> str:
    return f"{score.tokens:,} tokens, {score.bytes:,} bytes, {score.words:,} words"

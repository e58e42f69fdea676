"""The report of a comparison: `report.json` with all numbers, and `report.html` for a browser."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_recurrent.analysis.comparison import (
    WHERE,
    WHERE_RULE,
    Comparison,
    TopToken,
    gain_by_distance,
)
from block_recurrent.analysis.packing import pack_document
from block_recurrent.analysis.page_file import write_page
from block_recurrent.analysis.token_text import DISTANCE_RULE, NAME_RULE, WORD_RULE
from block_recurrent.evaluate.headroom import DEFINITIONS as HEADROOM_DEFINITIONS
from block_recurrent.evaluate.measures import DEFINITIONS, FEW_DOCUMENTS, MEASURES, Score, bootstrap
from block_recurrent.evaluate.show import number
from block_recurrent.io.output import finite, write_json

TOKENS_IN_PAGE = 2_000_000
"""Maximum number of tokens in a page: about 10 MB. Further documents are only in report.json."""


@dataclass(frozen=True)
class Side:
    """The description of A or B."""

    label: str
    about: str  # the run, its step, and the state edit
    config: dict[str, Any]  # the run's configuration


@dataclass(frozen=True)
class ReportData:
    """The contents of a report."""

    title: str
    subtitle: str
    comparison: Comparison
    a: Side
    b: Side
    inspections: list[dict[str, Any]]  # for report.json
    inspection_pages: list[dict[str, Any]]  # for the page


def write_report(folder: Path, data: ReportData) -> None:
    """Write `report.json` and `report.html` into the folder."""
    numbers = report_numbers(data)
    write_json(folder / "report.json", finite(numbers))
    shown = ("window", "segment", "top_a", "top_b", "by_distance", "headroom", "definitions")
    page = {key: numbers[key] for key in shown}
    page |= {
        "a": dataclasses.asdict(data.a),
        "b": dataclasses.asdict(data.b),
        "cards": _cards(data.comparison, numbers),
        "top_a_note": _top_note(data.comparison, data.comparison.top_a, data.a.label),
        "top_b_note": _top_note(data.comparison, data.comparison.top_b, data.b.label),
        "curves": [
            {"label": label, **curve.to_dict()}
            for label, curve in ((data.a.label, data.comparison.curve_a), (data.b.label, data.comparison.curve_b))
        ],
        "documents": _page_documents(data.comparison),
        "inspections": data.inspection_pages,
    }
    write_page(folder / "report.html", data.title, data.subtitle, ["comparison.html"], page)


def report_numbers(data: ReportData) -> dict[str, Any]:
    """The report as plain values."""
    found = data.comparison
    return {
        "title": data.title,
        "a": {**dataclasses.asdict(data.a), **_measures(found.total_a, [d.score_a for d in found.documents])},
        "b": {**dataclasses.asdict(data.b), **_measures(found.total_b, [d.score_b for d in found.documents])},
        "difference": _difference(found),
        "window": found.window,
        "segment": found.segment,
        "definitions": definitions(),
        "top_a": [top.to_dict() for top in found.top_a],
        "top_b": [top.to_dict() for top in found.top_b],
        "proper_names": {
            "all_tokens": found.name_share,
            "top_a": _share(found.top_a),
            "top_b": _share(found.top_b),
        },
        "where": {
            side: {place: sum(top.where == place for top in tops) for place in WHERE}
            for side, tops in (("top_a", found.top_a), ("top_b", found.top_b))
        },
        "by_distance": [dataclasses.asdict(bucket) for bucket in gain_by_distance(found)],
        "headroom": {side: headroom.to_dict() for side, headroom in zip("ab", found.headroom, strict=False)},
        "cumulative": {"a": found.curve_a.to_dict(), "b": found.curve_b.to_dict()},
        "documents": [
            {"name": d.name, "tokens": len(d.text), "a": d.score_a.to_dict(), "b": d.score_b.to_dict()}
            for d in found.documents
        ],
        "memory": data.inspections,
    }


def definitions() -> dict[str, str]:
    """Every term of the report."""
    return {
        **{name.replace("_", " "): text for name, text in DEFINITIONS.items()},
        "difference": "B's bits for a token minus A's: positive where A predicts it better",
        "token": "the token's number in its document, from 0",
        "word": WORD_RULE,
        "last mention": DISTANCE_RULE,
        "location": WHERE_RULE,
        "proper name": NAME_RULE,
        "cumulative cross-entropy": (
            "at x: mean bits per token over the first x tokens of every document that is at least x long"
        ),
        **{term if term == "headroom" else f"headroom: {term}": text for term, text in HEADROOM_DEFINITIONS.items()},
    }


def _measures(whole: Score, documents: list[Score]) -> dict[str, Any]:
    values = whole.to_dict()
    del values["name"]
    return {**values, "intervals_95": bootstrap(documents)}


def _difference(found: Comparison) -> dict[str, Any]:
    """B minus A, with a paired bootstrap interval."""
    paired = [dataclasses.replace(d.score_b, bits=d.score_b.bits - d.score_a.bits) for d in found.documents]
    return {
        "bits_per_token": (found.total_b.bits - found.total_a.bits) / max(1, found.total_a.tokens),
        "interval_95": bootstrap(paired)[MEASURES[0]],
        "share_of_tokens_where_a_is_better": float(
            sum(int((d.difference > 0).sum()) for d in found.documents) / max(1, found.total_a.tokens)
        ),
    }


def _share(tops: tuple[TopToken, ...]) -> float | None:
    return sum(top.proper_name for top in tops) / len(tops) if tops else None


def _top_note(found: Comparison, tops: tuple[TopToken, ...], label: str) -> str:
    if not tops:
        return f"{label} predicts no token better."
    places = {place: sum(top.where == place for top in tops) for place in WHERE}
    return (
        f"The {len(tops)} tokens with the largest advantage of {label}. Proper names: {100 * (_share(tops) or 0):.0f}% "
        f"(of all tokens: {100 * found.name_share:.1f}%). Last mention: {places['window']} within the window of "
        f"{found.window} tokens, {places['segment']} within the segment of {found.segment}, {places['beyond']} beyond, "
        f"{places['never']} never."
    )


def _cards(found: Comparison, numbers: dict[str, Any]) -> list[dict[str, str]]:
    difference = numbers["difference"]
    interval = difference["interval_95"]
    within = f"95% interval {interval[0]:+.4f} to {interval[1]:+.4f}" if interval else "one document: no interval"
    within += f" (only {len(found.documents)} documents)" if 1 < len(found.documents) < FEW_DOCUMENTS else ""
    names = numbers["proper_names"]
    beyond = numbers["where"]["top_a"]["beyond"] + numbers["where"]["top_a"]["segment"]
    count = max(1, len(found.top_a))
    return [
        {
            "label": f"A: {found.label_a}",
            "value": number(found.total_a.bits_per_token),
            "note": "bits per token",
            "tone": "a",
        },
        {
            "label": f"B: {found.label_b}",
            "value": number(found.total_b.bits_per_token),
            "note": "bits per token",
            "tone": "b",
        },
        {"label": "B − A, bits per token", "value": f"{difference['bits_per_token']:+.4f}", "note": within},
        {
            "label": "proper names in A's top",
            "value": "-" if names["top_a"] is None else f"{100 * names['top_a']:.0f}%",
            "note": f"of all tokens: {100 * names['all_tokens']:.1f}%",
        },
        {
            "label": "beyond the window in A's top",
            "value": f"{100 * beyond / count:.0f}%",
            "note": f"last mentioned over {found.window} tokens ago",
        },
        {
            "label": "tokens",
            "value": f"{found.total_a.tokens:,}",
            "note": f"{len(found.documents)} document{'s' if len(found.documents) > 1 else ''}",
        },
    ]


def _page_documents(found: Comparison) -> list[dict[str, Any]]:
    """Documents with their tokens, in order, up to the maximum size of a page; always the first."""
    room = TOKENS_IN_PAGE
    documents: list[dict[str, Any]] = []
    for document in found.documents:
        fits = len(document.text) <= room or not documents
        room -= len(document.text) if fits else 0
        documents.append(
            {
                "name": document.name,
                "tokens": len(document.text),
                "bits_a": document.score_a.bits_per_token or 0.0,
                "bits_b": document.score_b.bits_per_token or 0.0,
                "packed": pack_document(document) if fits else None,
            }
        )
    return documents

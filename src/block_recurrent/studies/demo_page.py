"""The report of the demo: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from block_recurrent import __version__
from block_recurrent.io.output import write_file

COLOURS = ("#2f6fde", "#d9822b", "#8a8f98")
WIDTH, HEIGHT = 900, 220


def write_demo_page(path: Path, found: dict[str, Any]) -> None:
    """Write the page with the results of `brt demo`; skipped parts are not shown."""
    title = "How much the memory helps" if "worth" in found else "A run that was stopped and resumed"
    css = (files("block_recurrent.analysis") / "page" / "report.css").read_text(encoding="utf-8")
    parts = [_card("Summary", "", _table(["", ""], found["closing"]))]
    if "worth" in found:
        parts += _memory_parts(found)
    if "training" in found:
        parts.append(_training_part(found["training"]))
    write_file(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{css}\npre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}'
        f"</style></head><body><header><div><h1>{escape(title)}</h1>"
        f'<p class="note">{escape(found["subtitle"])}</p></div></header><main>{"".join(parts)}</main>'
        f"<footer>Made by brt {__version__}. This page contains all its data and needs no network.</footer>"
        "</body></html>\n",
    )


def _memory_parts(found: dict[str, Any]) -> list[str]:
    worth, pairs = found["worth"], [("bits_per_token", "bits per token"), ("bits_per_byte", "bits per byte")]
    rows = [[way, *(f"{worth[key][way]:.4f}" for key, _ in pairs)] for way in worth["bits_per_token"]]
    words = [
        [w["word"], f"{w['chance']:.0%}", f"{w['chance_cleared']:.1%}", f"{w['distance']:,}", w["before"], w["earlier"]]
        for w in worth["words"]
    ]
    head = ["word", "probability", "state cleared", "last seen, tokens ago", "text before it", "last mention"]
    written = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in found["written"])
    return [
        _card(
            f"The second half of {found['document']}",
            found["definitions"],
            _table(["read", "bits per token", "bits per byte"], rows) + _chart(worth["curves"], "bits per token"),
        ),
        _card("Words that the memory helped to predict", "Each last occurred beyond the window.", _table(head, words)),
        _card("Where the memory saves most", "Darker: more bits saved on this token.", _shaded(worth["gains"])),
        _card("Generated from memories", "The same prompt and seed, unless noted.", written),
    ]


def _training_part(training: dict[str, Any]) -> str:
    rows = [[name, str(facts["step"]), facts["weights"][:16]] for name, facts in training["runs"].items()]
    curves = {name: facts["losses"] for name, facts in training["runs"].items()}
    note = "The two curves coincide: the losses of every step are identical."
    table = _table(["run", "steps", "SHA-256 of the weights"], rows)
    return _card("Trained from scratch, stopped, resumed", note, table + _chart(curves, "bits per byte"))


def _card(title: str, note: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead><tbody>{cells}</tbody></table>"
    )


def _shaded(gains: Sequence[Sequence[Any]]) -> str:
    spans = [
        f'<span style="background:rgba(47,111,222,{min(max(gain, 0) / 8, 0.8):.2f})" title="{gain:+.2f} bits">'
        f"{escape(text)}</span>"
        for text, gain in gains
    ]
    return f"<pre>{''.join(spans)}</pre>"


def _chart(curves: dict[str, list[float]], what: str) -> str:
    """Lines over the text or the steps, as SVG."""
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    lines, keys = [], []
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        points = " ".join(
            f"{i * WIDTH / max(len(curve) - 1, 1):.1f},{HEIGHT - (v - low) * HEIGHT / max(high - low, 1e-9):.1f}"
            for i, v in enumerate(curve)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        keys.append(f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span> ')
    picture = f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" width="100%" role="img">{"".join(lines)}</svg>'
    return f'<p class="legend">{"".join(keys)} {escape(what)}, {low:.2f} to {high:.2f}</p>{picture}'

"""The report of the demo: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from block_recurrent import __version__
from block_recurrent.io.output import write_file

COLORS = ("var(--a)", "var(--b)", "var(--faint-ink)")
WIDTH, HEIGHT = 900, 220
STYLE = """
main, header { max-width: 980px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { max-height: none; }
.legend { margin: 14px 0 6px; }
.plot { display: grid; grid-template-columns: auto 1fr; gap: 2px 10px; font-size: 12px; color: var(--faint-ink); }
.plot svg { width: 100%; height: 220px; border: solid var(--grid); border-width: 1px 0; }
.plot polyline { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.plot div { display: flex; justify-content: space-between; }
.plot .values { flex-direction: column; text-align: right; }
"""
FOLLOW_THEME = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => (document.documentElement.dataset.theme = dark.matches ? "dark" : "light");
dark.addEventListener("change", follow);
follow();
"""


def write_demo_page(path: Path, found: dict[str, Any]) -> None:
    """Write the page with the results of `brt demo`; skipped parts are not shown."""
    title = "How much the memory helps" if "worth" in found else "A run that was stopped and resumed"
    css = (files("block_recurrent.analysis") / "page" / "report.css").read_text(encoding="utf-8")
    parts = [_numbers(found["worth"]["bits_per_token"])] if "worth" in found else []
    parts.append(_card("Summary", "", _table(["", ""], found["closing"])))
    if "worth" in found:
        parts += _memory_parts(found)
    if "training" in found:
        parts.append(_training_part(found["training"]))
    write_file(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{css}{STYLE}</style><script>{FOLLOW_THEME}</script></head>"
        f"<body><header><div><h1>{escape(title)}</h1>"
        f'<p class="note">{escape(found["subtitle"])}</p></div></header><main>{"".join(parts)}</main>'
        f"<footer>Made by brt {__version__}. This page contains all its data and needs no network.</footer>"
        "</body></html>\n",
    )


def _numbers(bits: dict[str, float]) -> str:
    """Bits per token of each way of reading, in large type."""
    cards = [
        f'<div class="card number"><span class="label">bits per token, {escape(way)}</span><strong>{value:.2f}</strong>'
        f'<span class="note">{f"{value - next(iter(bits.values())):+.2f}" if i else "lower is better"}</span></div>'
        for i, (way, value) in enumerate(bits.items())
    ]
    return f'<div id="cards">{"".join(cards)}</div>'


def _memory_parts(found: dict[str, Any]) -> list[str]:
    worth, pairs = found["worth"], [("bits_per_token", "bits per token"), ("bits_per_byte", "bits per byte")]
    rows = [[way, *(f"{worth[key][way]:.4f}" for key, _ in pairs)] for way in worth["bits_per_token"]]
    words = [
        [w["word"], f"{w['chance']:.0%}", f"{w['chance_cleared']:.1%}", f"{w['distance']:,}", w["before"], w["earlier"]]
        for w in worth["words"]
    ]
    head = ["word", "probability", "state cleared", "last seen, tokens ago", "text up to the token", "last mention"]
    written = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in found["written"])
    curves = _chart(worth["curves"], "bits per token", ("middle of the text", "end"))
    return [
        _card(
            f"The second half of {found['document']}",
            found["definitions"],
            _table(["read", "bits per token", "bits per byte"], rows) + curves,
        ),
        _card("Words that the memory helped to predict", found["words_note"], _table(head, words)),
        _card("Where the memory saves most", "Darker: more bits saved on this token.", _shaded(worth["gains"])),
        _card("Generated from memories", found["written_note"], written),
    ]


def _training_part(training: dict[str, Any]) -> str:
    rows = [[name, str(facts["step"]), facts["weights"][:16]] for name, facts in training["runs"].items()]
    curves = {name: facts["losses"] for name, facts in training["runs"].items()}
    note = "The two curves coincide: the losses of every step are identical."
    table = _table(["run", "steps", "SHA-256 of the weights"], rows)
    chart = _chart(curves, "bits per byte", ("first step", "last step"))
    return _card("Trained from scratch, stopped, resumed", note, table + chart)


def _card(title: str, note: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    top = f"<thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{top}<tbody>{cells}</tbody></table></div>'


def _shaded(gains: Sequence[Sequence[Any]]) -> str:
    spans = [
        f'<span style="background:rgb(var(--a-soft) / {min(max(gain, 0) / 8, 0.8):.2f})" title="{gain:+.2f} bits">'
        f"{escape(text)}</span>"
        for text, gain in gains
    ]
    return f"<pre>{''.join(spans)}</pre>"


def _chart(curves: dict[str, list[float]], what: str, ends: tuple[str, str]) -> str:
    """Lines over the text or the steps, as SVG; labels are HTML, so that they stay readable on a phone."""
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    lines, keys = [], []
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        points = " ".join(
            f"{i * WIDTH / max(len(curve) - 1, 1):.1f},{HEIGHT - (v - low) * HEIGHT / max(high - low, 1e-9):.1f}"
            for i, v in enumerate(curve)
        )
        lines.append(f'<polyline points="{points}" stroke="{color}"/>')
        keys.append(f'<span class="key"><i style="background:{color}"></i>{escape(name)}</span> ')
    labels = "".join(f"<span>{value:.1f}</span>" for value in (high, (low + high) / 2, low))
    return (
        f'<p class="legend note">{escape(what)}: {"".join(keys)}</p><div class="plot">'
        f'<div class="values">{labels}</div>'
        f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" preserveAspectRatio="none" role="img">{"".join(lines)}</svg>'
        f"<span></span><div><span>{escape(ends[0])}</span><span>{escape(ends[1])}</span></div></div>"
    )

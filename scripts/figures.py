"""Draws the figures of the README and of the documentation: `python scripts/figures.py` writes docs/images/*.svg.

Each figure is an SVG with its own background, whose colors follow the reader's color scheme: it is readable on
light and dark pages, whichever theme the page around it has.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
EVIDENCE = ROOT / "results" / "evidence"

STYLE = """
:root{--paper:#ffffff;--ink:#1f2937;--soft:#64748b;--line:#94a3b8;--token:#e2e8f0;--seen:#bfdbfe;--blue:#2563eb;
--state:#fde68a;--amber:#b45309;--cell:#f8fafc}
@media (prefers-color-scheme:dark){:root{--paper:#161b22;--ink:#e6edf3;--soft:#9aa7b6;--line:#586474;--token:#2b3440;
--seen:#1e3a66;--blue:#7ab2ff;--state:#8a6a1c;--amber:#f6c453;--cell:#1d242d}}
text{font:18px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
.soft{fill:var(--soft)}.small{font-size:15px}.bold{font-weight:600}.mid{text-anchor:middle}.end{text-anchor:end}
.code{font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.blue{fill:var(--blue)}.amber{fill:var(--amber)}
.paper{fill:var(--paper)}.cell{fill:var(--cell);stroke:var(--line);stroke-width:1.5}
.token{fill:var(--token)}.seen{fill:var(--seen)}.state{fill:var(--state)}
.line{stroke:var(--line);stroke-width:2;fill:none}.up{stroke:var(--blue);stroke-width:2.5;fill:none}
.across{stroke:var(--amber);stroke-width:3.5;fill:none}.dash{stroke-dasharray:5 5}
.curve{stroke-width:3;fill:none}.rec{stroke:var(--amber)}.slide{stroke:var(--blue)}
.grid{stroke:var(--line);stroke-width:1;opacity:.35}
.gate{fill:var(--paper);stroke:var(--amber);stroke-width:2.5}
.blue-head{fill:var(--blue)}.amber-head{fill:var(--amber)}.line-head{fill:var(--line)}
"""
HEADS = {"up": "blue-head", "across": "amber-head", "line": "line-head"}


class Figure:
    """A drawing that grows by shapes; coordinates are pixels of a canvas that scales to the page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.shapes: list[str] = []
        self.box(0, 0, width, height, "paper", radius=12)

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words, quote=False)}</text>')

    def path(self, data: str, kind: str, head: bool = False) -> None:
        end = f' marker-end="url(#{HEADS[kind.split()[0]]})"' if head else ""
        self.shapes.append(f'<path d="{data}" class="{kind}"{end}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        self.shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"/>')

    def tokens(self, x: float, y: float, count: int, kind: str = "token", step: float = 20, size: float = 16) -> None:
        for number in range(count):
            self.box(x + number * step, y, size, size, kind, radius=3)

    def state(self, x: float, y: float) -> None:
        """A few state vectors, drawn as a stack of bars."""
        for row in range(4):
            self.box(x, y + row * 11, 44, 8, "state", radius=2)

    def svg(self) -> str:
        width, height = self.size
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" class="{name}"/></marker>'
            for name in HEADS.values()
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{self.title}">\n'
            f"<title>{self.title}</title>\n<style>{STYLE}</style>\n<defs>{markers}</defs>\n"
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


def recurrence() -> Figure:
    """The recurrent cell unrolled: a book comes in block by block, the state goes from cell to cell."""
    figure = Figure(
        820, 440, "A book flows block by block through the recurrent cell, which carries a state of fixed size"
    )
    figure.text(30, 40, "next-token predictions", "blue bold")
    figure.text(30, 413, "the book, W tokens per block", "soft")
    for number, name in enumerate(("block t", "block t + 1", "block t + 2")):
        x = 130 + number * 215
        figure.box(x, 110, 170, 150, "cell", radius=10)
        figure.text(x + 85, 136, "transformer layers", "mid small soft")
        figure.tokens(x + 7, 318, 8)
        figure.text(x + 85, 360, name, "mid small soft")
        for token in range(8):
            figure.path(f"M{x + 15 + token * 20} 312V268", "up", head=True)
            figure.path(f"M{x + 15 + token * 20} 102V62", "up", head=True)
        figure.path(f"M{x} 200H{x + 58}", "across", head=True)
        figure.state(x + 63, 181)
        figure.path(f"M{x + 107} 200H{x + 124}", "across")
        figure.circle(x + 141, 200, 17, "gate")
        figure.text(x + 141, 206, "g", "mid amber bold")
        figure.path(f"M{x + 158} 200H{x + 209 + 6 * (number < 2)}", "across", head=number == 2)
        figure.path(f"M{x + 85} 254V232", "line", head=True)
        figure.path(f"M{x + 85} 172V150", "line", head=True)
    figure.text(30, 180, "state", "amber bold")
    figure.path("M40 200H130", "across")
    figure.text(30, 228, "S vectors", "small amber")
    figure.path("M30 380H775", "line", head=True)
    figure.text(790, 413, "g: gate, which keeps or replaces the state", "end soft")
    return figure


def blocks() -> Figure:
    """Documents, segments, blocks and the window of a token."""
    figure = Figure(
        820, 390, "A document is cut into segments, a segment into blocks; a token attends to the W tokens before it"
    )
    left, step = 60, 29
    figure.text(30, 40, "a document", "bold")
    figure.path("M60 62H790", "line", head=True)
    for number in range(24):
        kind = "seen" if 10 <= number < 14 else "token"
        figure.box(left + number * step, 84, 23, 23, "cell" if number == 14 else kind, radius=4)
    figure.box(left + 14 * step, 84, 23, 23, "blue", radius=4)
    figure.path(
        f"M{left + 14 * step + 11} 112C{left + 14 * step} 160 {left + 11 * step} 160 {left + 11 * step + 8} 114",
        "up",
        head=True,
    )
    figure.text(left + 15 * step, 146, "window: the W tokens before it (W = 4)", "small blue")
    for number in range(6):
        x = left + number * 4 * step
        figure.path(f"M{x} 186V194H{x + 4 * step - 6}V186", "line")
        figure.text(x + 2 * step - 3, 216, "block", "mid small soft")
        figure.path(f"M{x + 4 * step - 3} 240V262", "across", head=True)
    figure.text(left, 286, "at each block's end the recurrent cell updates the state", "small amber")
    for number in range(2):
        x = left + number * 12 * step
        figure.path(f"M{x} 310V320H{x + 12 * step - 6}V310", "line")
        figure.text(
            x + 6 * step - 3,
            344,
            ("segment: one training step", "next segment: the memory is carried over")[number],
            "mid small",
        )
    figure.text(left, 374, "gradients stay inside a segment", "small soft")
    return figure


def memory() -> Figure:
    """The memory as a value: one goes in, a new one comes out, and it can be saved, forked and loaded."""
    figure = Figure(
        820,
        400,
        "The memory is a value: it goes into a call and a new one comes out; it can be saved, loaded and forked",
    )
    figure.text(30, 42, "logits, memory = model(tokens, memory)", "code bold")

    def call(x: float, y: float, words: str) -> None:
        figure.box(x, y, 110, 56, "cell", radius=8)
        figure.text(x + 55, y + 34, "model", "mid")
        figure.text(x + 55, y + 96, words, "mid small soft")
        figure.path(f"M{x + 55} {y + 80}V{y + 62}", "up", head=True)

    def value(x: float, y: float, words: str) -> None:
        figure.state(x, y)
        figure.text(x + 22, y - 10, words, "mid small amber")

    figure.text(60, 142, "empty", "mid small amber")
    figure.path("M92 137H118", "across", head=True)
    call(122, 110, "chapter 1")
    figure.path("M232 137H258", "across", head=True)
    value(264, 116, "memory 1")
    figure.path("M312 137H338", "across", head=True)
    call(342, 110, "chapter 2")
    figure.path("M452 137H478", "across", head=True)
    value(484, 116, "memory 2")
    figure.path("M532 137H558", "across", head=True)
    call(562, 110, "a question")
    figure.path("M672 137H698", "across", head=True)
    value(704, 116, "memory 3")
    figure.path("M506 164C506 290 520 297 556 297", "across dash", head=True)
    call(562, 270, "another one")
    figure.path("M672 297H698", "across", head=True)
    value(704, 276, "memory 3'")
    figure.text(484, 262, "fork", "end amber bold")
    figure.path("M286 164V268", "line dash", head=True)
    figure.box(216, 274, 140, 52, "cell", radius=8)
    figure.text(286, 306, "book.memory", "mid code")
    figure.text(286, 352, "a file of fixed size,", "mid small soft")
    figure.text(286, 374, "regardless of the book's length", "mid small soft")
    figure.text(272, 236, "save", "end small soft")
    return figure


def evidence_curves() -> Figure:
    """Training bits of rec-fixed-skip and slide-plus, on code and on LaTeX, from results/evidence/code.json."""
    figure = Figure(1000, 420, "Bits per token during training, rec-fixed-skip and slide-plus, on code and LaTeX")
    runs = json.loads((EVIDENCE / "code.json").read_text(encoding="utf-8"))["runs"]
    panels = (("code", "Python source", 48, (3.5, 6.0)), ("latex", "LaTeX", 64, (2.0, 4.5)))
    for x, (corpus, words, states, (low, high)) in zip((70, 570), panels, strict=True):
        left, top, width, height, first, last = x, 70, 380, 280, 300, 1200
        figure.text(left, 42, f"{words}: bits per token in training", "bold")
        for bits in range(int(low * 2), int(high * 2) + 1):
            y = top + height * (high - bits / 2) / (high - low)
            figure.path(f"M{left} {y:g}H{left + width}", "grid")
            if bits % 2 == 0:
                figure.text(left - 10, y + 5, f"{bits // 2}", "small soft end")
        for step in range(first, last + 1, 300):
            across = left + width * (step - first) / (last - first)
            figure.text(across, top + height + 26, f"{step:,}", "small soft mid")
        figure.text(left + width / 2, top + height + 52, "updates of 4,096 tokens", "small soft mid")
        for system, kind in (("slide-plus", "slide"), ("rec-fixed-skip", "rec")):
            chosen = [run for run in runs if _is_shown(run, corpus, system, states)]
            curve = [mean(values) for values in zip(*(map(_bits, run["training"]) for run in chosen), strict=True)]
            points = []
            for number, bits in enumerate(curve[first // 100 - 1 :]):
                across = left + width * number * 100 / (last - first)
                points.append(f"{across:.1f} {top + height * (high - bits) / (high - low):.1f}")
            figure.path("M" + "L".join(points), f"curve {kind}")
            y = top + 24 + (24 if kind == "rec" else 0)
            seeds = f"{len(chosen)} seeds" if len(chosen) > 1 else "1 seed"
            figure.path(f"M{left + 170} {y - 6}h26", f"curve {kind}")
            figure.text(left + 204, y, f"{system}, {seeds}", "small")
    return figure


def _is_shown(run: dict[str, Any], corpus: str, system: str, states: int) -> bool:
    """Whether it is a whole run of the default recipe: repeats are only for systems with a memory."""
    if run["corpus"] != corpus or run["system"] != system or run["steps"] != 1200:
        return False
    return run["repeats"] == 0 if system == "slide-plus" else (run["repeats"], run["num_states"]) == (0.2, states)


def _bits(line: dict[str, Any]) -> float:
    return line["bits_per_token"]


def _together(label: str, bands: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(band["tokens"] for band in bands)
    saved = sum(band["tokens"] * band["mean_difference"] for band in bands)
    return {"label": label, "tokens": tokens, "mean_difference": saved / tokens}


def evidence_distance() -> Figure:
    """What carrying the state saves, by distance to the last mention, from results/evidence/remembered-code.json."""
    figure = Figure(
        1000, 360, "Bits per token saved by carrying the state, by distance to the last mention of the word"
    )
    bands = json.loads((EVIDENCE / "remembered-code.json").read_text(encoding="utf-8"))["by_distance"]
    bands = [*bands[:4], _together("2,049 and more", [band for band in bands[4:] if band["label"] != "never"])]
    left, top, height, step = 70, 80, 190, 900 / len(bands)
    most = max(band["mean_difference"] for band in bands)
    figure.text(
        left, 42, "Bits per token saved by carrying the state, by tokens since the word was last mentioned", "bold"
    )
    for number, band in enumerate(bands):
        bar, x = height * band["mean_difference"] / most, left + number * step
        inside = band["label"] in ("1-32", "33-128")
        figure.box(x, top + height - bar, step - 18, bar, "seen" if inside else "state", radius=4)
        figure.text(x + (step - 18) / 2, top + height - bar - 8, f"{band['mean_difference']:.2f}", "small mid")
        figure.text(x + (step - 18) / 2, top + height + 24, band["label"], "small soft mid")
    figure.box(left, 322, 16, 16, "seen", radius=3)
    figure.text(left + 24, 336, "within reach of the window in 4 layers", "small soft")
    figure.box(left + 330, 322, 16, 16, "state", radius=3)
    figure.text(left + 354, 336, "beyond it: only the state can know", "small soft")
    return figure


FIGURES = {
    "recurrence": recurrence,
    "blocks": blocks,
    "memory": memory,
    "evidence-curves": evidence_curves,
    "evidence-distance": evidence_distance,
}


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(IMAGES / f"{name}.svg", file=sys.stderr)


if __name__ == "__main__":
    main()

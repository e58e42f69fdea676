"""One self-contained HTML file with style, scripts and data; it loads nothing from a network."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from block_recurrent import __version__
from block_recurrent.io.output import finite, write_file

SCRIPTS = ("charts.js", "bars.js", "book.js", "tables.js", "report.js")


def write_page(path: Path, title: str, subtitle: str, bodies: list[str], data: dict[str, Any]) -> None:
    """Write the page; bodies: files of the folder `page` for its body."""
    parts = {
        "TITLE": html.escape(title),
        "SUBTITLE": html.escape(subtitle),
        "STYLE": _part("report.css"),
        "VERSION": __version__,
        "BODY": "\n".join(_part(body) for body in bodies),
        "SCRIPT": "\n".join(_part(script) for script in SCRIPTS),
        "DATA": _json_in_html({"title": title, **data}),
    }
    # In a single pass: inserted text is not searched for placeholders.
    write_file(path, re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _part("frame.html")))


def _part(name: str) -> str:
    return (files("block_recurrent.analysis") / "page" / name).read_text(encoding="utf-8")


def _json_in_html(data: Any) -> str:
    """JSON that can't end the surrounding script element, nor open a comment in it."""
    text = json.dumps(finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

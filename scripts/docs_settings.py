"""The reference of all settings, made from the fields of the configuration and the text next to each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from block_recurrent.run_config import SECTIONS


def page() -> str:
    """A table of each section as Markdown."""
    lines = [
        "# Settings",
        "",
        "Set with `brt train --set section.key=value`, in a TOML file for `--config`, or in Python with `resolve`. "
        "The defaults here are those of the paper's base configuration; a system and a size (`--system`, `--size`) "
        "change many of them. `brt train --dry-run` prints the resolved values. [Training](../training.md) explains "
        "how they work together.",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"## {section}", "", inspect.getdoc(kind) or "", "", "| key | default | meaning |"]
        lines.append("| --- | --- | --- |")
        lines += [
            f"| `{section}.{name}` | {_shown(default)} | {text.replace('|', chr(92) + '|')} |"
            for name, default, text in fields(kind)
        ]
    return "\n".join(lines) + "\n"


def fields(kind: Any) -> list[tuple[str, Any, str]]:
    """Name, default and description of each field: the string after it, or the comment on its line."""
    source = textwrap.dedent(inspect.getsource(kind))
    rows, body = source.splitlines(), ast.parse(source).body[0].body  # type: ignore[attr-defined]
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    found = []
    for item, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        text = rows[item.lineno - 1].partition("  # ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        text = text if text[1:2] == ":" else text[:1].upper() + text[1:]  # but a shape letter stays as it is
        found.append((item.target.id, defaults[item.target.id], text.rstrip(".")))
    return found


def _shown(default: Any) -> str:
    if default in ("", (), None):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"

"""Notebooks as pages: Markdown cells as they are, code in fences, and the outputs that were saved with the notebook."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def pages(notebook: Path) -> dict[str, str | bytes]:
    """By file name: the page and its pictures."""
    parts: list[str] = []
    files: dict[str, str | bytes] = {}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for index, output in enumerate(cell["outputs"]):
            name = f"{notebook.stem}-{number}-{index}.png"
            text, picture = _text(output), output.get("data", {}).get("image/png")
            if picture:
                files[name] = base64.b64decode(picture)
                parts.append(f"![Output of the cell above]({name})")
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    link = f"This page is a notebook: [download it]({notebook.name}) and run it; it needs no network."
    files[f"{notebook.stem}.md"] = "\n\n".join([*parts, "---", link]) + "\n"
    return files


def _text(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "".join(output["text"]) if output["name"] == "stdout" else ""
    return "".join(output.get("data", {}).get("text/plain", ""))

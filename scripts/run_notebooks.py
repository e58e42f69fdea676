"""Runs the notebooks of docs/notebooks and keeps their outputs in them: `make notebooks`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "docs" / "notebooks"


def run(path: Path, seconds: int = 1800) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run, without progress lines and times."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_result(output)]
    notebook.metadata.get("language_info", {}).pop("version", None)
    return notebook


def _is_result(output: nbformat.NotebookNode) -> bool:
    """What was printed, and pictures; the lines of a progress display are neither."""
    return output.get("name") == "stdout" or "image/png" in output.get("data", {})


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path, file=sys.stderr)
        nbformat.write(run(path), path)


if __name__ == "__main__":
    main()

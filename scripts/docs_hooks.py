"""Hooks of mkdocs: pages that are generated (command line, settings, notebooks), and files from outside docs/.

The pages of docs/ link to `../results/x.md` and the like, so that links work in the repository too. In the site those
files are one level higher, and the hook shortens the links.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def _script(name: str) -> Any:
    """A module of this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files: Files, config: Any) -> Files:
    sys.path.insert(0, str(ROOT / "src"))
    for path in [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "results").rglob("*"))]:
        if path.is_file():
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for page in ("cli", "settings"):
        files.append(File.generated(config, f"reference/{page}.md", content=_script(f"docs_{page}").page()))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for name, content in _script("docs_notebook").pages(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page of the repository, as links of the site."""
    source = page.file.src_uri
    inside = (ROOT / "docs" / source).is_file() or source.startswith(("reference/", "notebooks/"))
    here = posixpath.dirname(f"docs/{source}" if inside else source)

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:", target):
            return match[0]
        place = posixpath.normpath(posixpath.join(here, target)).removeprefix("docs/")
        if place.endswith(".ipynb") and source != place.replace(".ipynb", ".md"):
            place = place.replace(".ipynb", ".md")  # the page of the notebook, but for its own link to the file
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(source) or '.')}{match[3]}"

    return _LINK.sub(moved, markdown)

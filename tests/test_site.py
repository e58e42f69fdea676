"""The documentation site is built strictly, offline, and needs nothing from other hosts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from block_recurrent.cli.main import COMMANDS
from block_recurrent.run_config import SECTIONS

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="needs mkdocs")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    site = tmp_path_factory.mktemp("site")
    dead = "http://127.0.0.1:9"  # whoever asks for the network gets an error
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": dead, "https_proxy": dead}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def test_every_page_of_docs_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    assert (site / "notebooks" / "inside-the-memory.html").is_file()
    assert (site / "results" / "write.html").is_file()


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8")):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), f"{page.name}: {tag}"


def test_the_reference_has_every_command_and_flag(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f'id="brt-{name}"' in page
    for flag in ("--system", "--wandb", "--clear-every", "--trail-every"):
        assert flag in page


def test_the_reference_has_every_setting(site: Path) -> None:
    page = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    for section, kind in SECTIONS.items():
        rows = script("docs_settings").fields(kind)
        assert [name for name, _, _ in rows] == [field.name for field in dataclasses.fields(kind)]
        for name, _, meaning in rows:
            assert meaning, f"{section}.{name} has no description"
            assert f"{section}.{name}</code>" in page


def test_the_reference_has_every_public_name(site: Path) -> None:
    import block_recurrent

    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in set(block_recurrent.__all__) - {"__version__", "keep_freed_memory"}:
        assert re.search(rf'id="block_recurrent\.[\w.]*\b{name}"', page), name


def test_the_figures_are_those_of_the_script() -> None:
    figures = script("figures")
    assert figures.FIGURES
    for name, draw in figures.FIGURES.items():
        drawn = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == draw().svg(), f"{name}.svg is old: run scripts/figures.py"

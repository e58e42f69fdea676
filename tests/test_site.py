"""The documentation site is built strictly, offline, and needs nothing from other hosts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from block_recurrent.cli.main import COMMANDS
from block_recurrent.run_config import SECTIONS

from .analysis.browser import FLAGS, find_browser

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if find_browser() is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_no_errors(site: Path, browser: Any, theme: str) -> None:
    """Opened from disk, without a network. Tables, code and figures may scroll, but not the page."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=theme, offline=True)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    for name in ("index", "concepts", "evidence", "reference/cli", "reference/api", "notebooks/inside-the-memory"):
        page.goto((site / f"{name}.html").as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels wider than the screen"
        dark = page.evaluate("document.body.getAttribute('data-md-color-scheme')") == "slate"
        assert dark == (theme == "dark")
    assert not problems
    context.close()


def test_the_search_works_from_disk(site: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type("resume")
    page.wait_for_selector(".md-search-result__item a")
    found = " ".join(item.inner_text() for item in page.query_selector_all(".md-search-result__item"))
    assert "Training" in found
    context.close()


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

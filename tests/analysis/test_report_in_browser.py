"""The report in a real browser: no network, no error; the slider moves the text, a click on a spike shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .browser import find_browser, opened
from .made_report import write_made_report

pytest.importorskip("playwright", reason="the page tests need playwright")
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium found: install Debian's package 'chromium'")

TOKENS = 6000
SPIKE = 4321


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 6,000 tokens in which one token stands out, and a second document."""
    folder = tmp_path_factory.mktemp("report")
    write_made_report(folder, TOKENS, spikes={SPIKE: 9.0, 100: -7.0})
    return folder / "report.html"


@pytest.fixture
def page(report: Path) -> Iterator[Any]:
    with opened(report) as (page, problems):
        yield page
        assert problems == []


def test_opens_with_everything_drawn(page: Any) -> None:
    assert page.title() == "made A against made B"
    assert page.locator("#cards .card").count() == 6
    assert page.locator("#top-a tbody tr").count() > 3
    for canvas in ("spikes", "distances", "headroom-distances", "cumulative"):
        drawn = page.evaluate(
            """(id) => { const c = document.getElementById(id);
                         const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                         return new Set(new Uint32Array(d.buffer)).size }""",
            canvas,
        )
        assert drawn > 3, f"{canvas} is empty"
    assert page.locator("#headroom-bands tbody tr").count() == 4
    assert page.locator("#memory canvas").count() == 5
    assert page.locator("#definitions dt").count() >= 8
    assert page.locator("#configurations details").count() == 2


def test_the_slider_moves_the_text(page: Any) -> None:
    first = page.inner_text("#text")
    assert first.startswith("word0 ")
    page.locator("#slider").focus()
    page.evaluate(
        "s => { const e = document.querySelector('#slider'); e.value = s; e.dispatchEvent(new Event('input')) }", 3000
    )
    page.wait_for_function("report.pane.start === 3000")
    moved = page.inner_text("#text")
    assert moved != first
    assert page.locator("#text span").first.get_attribute("data-i") == "3000"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("report.pane.start === 3001")


def test_only_what_is_seen_is_in_the_page(page: Any) -> None:
    assert page.locator("#text span").count() < TOKENS / 2


def test_a_click_on_a_spike_shows_its_excerpt(page: Any) -> None:
    x = page.evaluate("i => report.spikes.xOf(i)", SPIKE)
    page.locator("#spikes").click(position={"x": x, "y": 30})
    page.wait_for_selector("#detail mark")
    assert page.inner_text("#detail mark").strip() == f"word{SPIKE}"
    assert f"{SPIKE:,}" in page.inner_text("#detail dl")
    assert "+9.000 bits" in page.inner_text("#detail dl")
    page.wait_for_selector(f"#text .selected[data-i='{SPIKE}']")


def test_a_click_beside_takes_the_largest_nearby(page: Any) -> None:
    x = page.evaluate("i => report.spikes.xOf(i)", 100)
    page.locator("#spikes").click(position={"x": x + 3, "y": 150})
    page.wait_for_selector("#detail mark")
    assert page.inner_text("#detail mark").strip() == "word100"
    assert "−7.000 bits" in page.inner_text("#detail dl")


def test_a_row_of_the_table_opens_its_document(page: Any) -> None:
    row = page.locator("#top-a tbody tr", has_text="second").first
    row.click()
    page.wait_for_selector("#detail mark")
    assert page.locator("#document").input_value() == "1"
    assert "second" in page.inner_text("#detail mark")


def test_a_token_of_the_text_can_be_clicked(page: Any) -> None:
    page.locator("#text span[data-i='5']").click()
    page.wait_for_selector("#detail mark")
    assert page.inner_text("#detail mark").strip() == "word5"


def test_keys(page: Any) -> None:
    page.keyboard.press("n")
    page.wait_for_selector("#text .selected")
    first = page.evaluate("report.selected")
    page.keyboard.press("n")
    page.wait_for_function(f"report.selected > {first}")
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != theme


def test_zoom_shows_fewer_tokens(page: Any) -> None:
    page.locator("#spikes").hover()
    page.mouse.wheel(0, -1500)
    page.wait_for_function(f"report.spikes.to - report.spikes.from < {TOKENS} / 4")
    page.locator("#whole").click()
    page.wait_for_function(f"report.spikes.to - report.spikes.from === {TOKENS}")


@pytest.mark.parametrize(("theme", "width"), [("dark", 1360), ("light", 420)])
def test_dark_and_narrow(report: Path, theme: str, width: int) -> None:
    with opened(report, theme, width) as (page, problems):
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), "nothing sticks out"
        assert problems == []


def test_every_character_is_where_it_belongs(tmp_path: Path) -> None:
    """Byte tokens of letters of up to four bytes: the pane shows the text as it is."""
    content = "Zoë said “été” 😀 and 漢字, then " * 30
    write_made_report(tmp_path, len(content.encode()), content=content)
    with opened(tmp_path / "report.html") as (page, problems):
        shown = page.evaluate("document.querySelector('#text').textContent")
        assert content.startswith(shown[:200])
        at = len(content[: content.index("😀")].encode())
        assert page.evaluate("i => report.book.token(i)", at) == "😀"
        assert page.evaluate("i => report.book.token(i)", at + 1) == ""
        assert problems == []


def test_differences_survive_packing(report: Path) -> None:
    with opened(report) as (page, _):
        shown = page.evaluate("Array.from(report.book.difference.slice(0, 200))")
    made = np.random.default_rng(0).normal(0, 0.3, TOKENS)[:200]
    made[100] = -7.0
    assert shown == pytest.approx(made, abs=0.0011)

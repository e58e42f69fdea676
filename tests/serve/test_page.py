"""The page in a real browser: read a book, write, see colors, branch, rewind; by mouse, by keyboard, on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.browser import FLAGS, find_browser

from .conftest import Served, book

pytest.importorskip("playwright", reason="the page tests need playwright")
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium found: install Debian's package 'chromium'")
TEXT = book(500, seed=8)
SECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(served: Served, browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from opened(served, browser, request.param, 1280)


@pytest.fixture
def phone(served: Served, browser: Any) -> Iterator[Any]:
    yield from opened(served, browser, "light", 390)


def opened(served: Served, browser: Any, theme: str, width: int) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme)
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    problems: list[str] = []
    # Chromium says of every answer of 400 that it failed; that the page tells it, a test looks at.
    page.on("console", lambda it: problems.append(it.text) if it.type == "error" and "of 400" not in it.text else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda it: None if it.url.startswith((served.url, "data:")) else problems.append(it.url))
    page.goto(served.url)
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    assert problems == []
    context.close()
    for memory in served.client.get("/v1/memories").json()["data"]:
        served.client.delete(f"/v1/memories/{memory['name']}")


def read_book(page: Any, tmp_path: Path, name: str = "Moby Dick.txt") -> None:
    (tmp_path / name).write_text(TEXT)
    page.set_input_files("#file", tmp_path / name)
    page.wait_for_selector("#shelf li[data-name='Moby-Dick'][aria-selected=true]")


def write(page: Any, words: str = "", tokens: int = 30) -> None:
    page.fill("#tokens", str(tokens))
    page.fill("#seed", "3")
    page.fill("#prompt", words)
    page.click("#go")
    page.wait_for_selector("#text span[data-worth]", state="attached")


def until(page: Any, true: str) -> None:
    """Playwright's own waiting evaluates text in the page, which the page's policy forbids."""
    for _ in range(SECONDS // 50):
        if page.evaluate(true):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not happen: {true}")


def answer(page: Any, text: str | None = None) -> None:
    page.wait_for_selector("#ask[open]")
    if text is not None:
        page.fill("#ask-value", text)
    page.click("#ask-ok")


def test_read_write_branch_rewind(page: Any, served: Served, tmp_path: Path) -> None:
    assert page.is_visible("#empty")
    read_book(page, tmp_path)
    size = len(TEXT.encode())
    assert f"{size:,} tokens" in page.inner_text("#facts")
    assert page.inner_text("#text").strip()[-20:] == TEXT[-20:]
    assert page.locator("#chart path").count() == 3
    write(page, " Ahab")
    spans = page.locator("#text span[data-i]")
    assert spans.count() == 35
    backgrounds = page.evaluate("[...document.querySelectorAll('[data-worth]')].map((s) => s.style.background)")
    assert len(set(backgrounds)) > 5
    expected = served.complete(memory=f"Moby-Dick@{size}", prompt=" Ahab", max_tokens=30, seed=3, temperature=0.8)
    assert page.evaluate("desk.passages[0].tokens.slice(5).map((t) => t.id)") == expected["choices"][0]["token_ids"]

    # Some of what a random model writes has no shape of its own, such as a mark that joins the letter before it.
    page.locator("#text span[data-i]:visible").nth(12).hover()
    page.wait_for_selector("#tip:not([hidden])")
    assert page.locator("#tip tr").count() == 6
    assert "with an empty memory" in page.inner_text("#tip")
    page.keyboard.press("Escape")

    page.click("#fork")
    answer(page)
    page.wait_for_selector("#shelf li.child[aria-selected=true]")
    assert page.inner_text("#title") == "Moby-Dick-2"
    page.locator(f"#chart .stop[data-at='{size}']").click()
    page.click("#place-rewind")
    until(page, f"memories.open.name === 'Moby-Dick-2' && memories.open.tokens === {size}")
    assert served.client.get("/v1/memories/Moby-Dick").json()["tokens"] == size + 35
    assert page.locator("#text span[data-i]").count() == 0


def test_another_token_is_another_branch(page: Any, served: Served, tmp_path: Path) -> None:
    read_book(page, tmp_path)
    write(page, tokens=12)
    page.locator("#text span[data-i]").nth(5).hover()
    page.wait_for_selector("#tip:not([hidden])")
    other = page.locator("#tip tr[data-token]:not([data-token^='bytes:'])").first
    token = other.get_attribute("data-token")
    other.click()
    page.wait_for_selector("#shelf li.child[aria-selected=true]")
    until(page, "desk.passages[0]?.tokens.length === 18 && desk.passages[0].tokens[5].bits !== undefined")
    assert page.evaluate("desk.passages[0].tokens[5].text") == token
    size = len(TEXT.encode())
    assert served.client.get("/v1/memories/Moby-Dick-2").json()["tokens"] == size + 18
    assert served.client.get("/v1/memories/Moby-Dick").json()["tokens"] == size + 12


def test_by_keyboard(phone: Any, served: Served, tmp_path: Path) -> None:
    """On a phone's width too: nothing is wider than the screen."""
    served.read("first", "One text.")
    served.read("second", "Another text, which is longer.")
    phone.reload()
    phone.wait_for_selector("html[data-ready]", state="attached")
    phone.focus("#shelf")
    phone.keyboard.press("End")
    until(phone, "memories.open.name === 'second'")
    phone.keyboard.press("ArrowUp")
    until(phone, "memories.open.name === 'first'")
    phone.fill("#tokens", "5")
    phone.focus("#prompt")
    phone.keyboard.type(" And")
    phone.keyboard.press("Control+Enter")
    until(phone, f"memories.open.tokens === {len('One text. And') + 5}")
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_error_is_told(page: Any, served: Served, tmp_path: Path) -> None:
    read_book(page, tmp_path)
    page.click("#rename")
    answer(page, "no/such name")
    page.wait_for_selector("#told.wrong")
    assert "is not a valid name" in page.inner_text("#told")


def test_the_api_is_described(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/docs")
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator("article").count() >= 12

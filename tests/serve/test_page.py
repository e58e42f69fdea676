"""The page in a real browser: read a book, write, see colors, branch, rewind; by mouse, by keyboard, on a phone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.serve.limits import Limits
from block_recurrent.serve.scheduler import Scheduler
from tests.analysis.browser import FLAGS, find_browser

from .conftest import Served, book, serving

pytest.importorskip("playwright", reason="the page tests need playwright")
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium found: install Debian's package 'chromium'")
TEXT = book(500, seed=8)
SIZE = len(TEXT.encode())
ENDING = SIZE % 512
"""Tokens after the last checkpoint."""
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
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme, has_touch=width < 500)
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
    page.wait_for_selector("#text span[data-worth]", state="attached")


def write(page: Any, words: str = "", tokens: int = 30) -> None:
    page.fill("#tokens", str(tokens))
    page.fill("#seed", "3")
    page.fill("#prompt", words)
    page.click("#go")
    until(
        page, f"!desk.writing && desk.passages.at(-1)?.tokens.length >= {tokens} && desk.passages.at(-1).tokens[0].bits"
    )


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
    assert f"{SIZE:,} tokens" in page.inner_text("#facts")
    assert page.inner_text("#text").strip()[-20:] == TEXT[-20:]
    assert page.locator("#chart path").count() == 3
    write(page, " Ahab")
    spans = page.locator("#text span[data-i]")
    assert spans.count() == ENDING + 35
    backgrounds = page.evaluate("[...document.querySelectorAll('[data-worth]')].map((s) => s.style.background)")
    assert len(backgrounds) == ENDING + 35
    assert len(set(backgrounds)) > 5
    expected = served.complete(memory=f"Moby-Dick@{SIZE}", prompt=" Ahab", max_tokens=30, seed=3, temperature=0.8)
    assert page.evaluate("desk.passages.at(-1).tokens.slice(5).map((t) => t.id)") == expected["choices"][0]["token_ids"]

    # Some of what a random model writes has no shape of its own, such as a mark that joins the letter before it.
    page.locator("#text span[data-i^='1.']:visible").nth(12).hover()
    page.wait_for_selector("#tip:not([hidden])")
    assert page.locator("#tip tr").count() == 6
    assert "with an empty memory" in page.inner_text("#tip")
    page.keyboard.press("Escape")

    page.click("#fork")
    answer(page)
    page.wait_for_selector("#shelf li.child[aria-selected=true]")
    assert page.inner_text("#title") == "Moby-Dick-2"
    page.locator(f"#chart .stop[data-at='{SIZE}']").click()
    page.click("#place-rewind")
    until(page, f"memories.open.name === 'Moby-Dick-2' && memories.open.tokens === {SIZE}")
    assert served.client.get("/v1/memories/Moby-Dick").json()["tokens"] == SIZE + 35
    page.wait_for_selector("#text span[data-worth]", state="attached")
    assert page.locator("#text span[data-i]").count() == ENDING


def test_another_token_is_another_branch(page: Any, served: Served, tmp_path: Path) -> None:
    """By mouse in the light theme, by keyboard in the dark one."""
    read_book(page, tmp_path)
    write(page, tokens=12)
    if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches"):
        page.focus("#text")
        page.keyboard.press("End")
        for _ in range(40):
            if page.evaluate("document.querySelector('.chosen').dataset.i") == "1.5":
                break
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        other = page.locator("#tip tr:focus")
    else:
        page.locator("#text span[data-i='1.5']").dispatch_event("pointerover", {"bubbles": True})
        other = page.locator("#tip tr[tabindex]").first
    page.wait_for_selector("#tip:not([hidden])")
    token = other.get_attribute("data-token")
    other.press("Enter")
    page.wait_for_selector("#shelf li.child[aria-selected=true]")
    until(page, "desk.passages.at(-1)?.tokens.length === 18 && desk.passages.at(-1).tokens[5].bits !== undefined")
    assert page.evaluate("desk.passages.at(-1).tokens[5].text") == token
    assert served.client.get("/v1/memories/Moby-Dick-2").json()["tokens"] == SIZE + 18
    assert served.client.get("/v1/memories/Moby-Dick").json()["tokens"] == SIZE + 12


def test_after_a_reload_the_end_has_its_colours(phone: Any, served: Served, tmp_path: Path) -> None:
    read_book(phone, tmp_path)
    write(phone, " Ahab", tokens=9)
    phone.reload()
    phone.wait_for_selector("#text span[data-worth]", state="attached")
    assert phone.locator("#text span[data-worth]").count() == ENDING + 5 + 9
    before = TEXT.encode()[: SIZE - ENDING].decode(errors="ignore")  # the checkpoint may lie within a character
    assert before[-20:] in phone.inner_text("#text .ending")[-22:]
    phone.locator("#text span[data-i]:visible").nth(3).tap()
    phone.wait_for_timeout(400)
    assert "with an empty memory" in phone.inner_text("#tip")
    phone.tap("#title")
    assert phone.is_hidden("#tip")


def test_another_memory_is_opened_while_one_is_written(
    phone: Any, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.read("other", "Another text.")
    read_book(phone, tmp_path)
    decode = Scheduler._decode
    monkeypatch.setattr(Scheduler, "_decode", lambda scheduler: (time.sleep(0.05), decode(scheduler)))
    phone.fill("#tokens", "30")
    phone.fill("#seed", "3")
    phone.click("#go")
    until(phone, "desk.passages.at(-1).tokens.length > 3 && desk.writing !== null")
    phone.click("#shelf li[data-name='other']")
    until(phone, "desk.memory.name === 'other'")
    assert phone.locator("#text span[data-i]").count() == 0
    until(phone, "!desk.writing")
    assert phone.evaluate("memories.open.name") == "other"
    assert phone.inner_text("#text") == "Another text."
    phone.click("#shelf li[data-name='Moby-Dick']")
    until(phone, "desk.memory.name === 'Moby-Dick' && desk.passages.length > 1")
    tokens = served.client.get("/v1/memories/Moby-Dick").json()["tokens"]
    assert SIZE < tokens <= SIZE + 30
    assert phone.evaluate("desk.passages.at(-1).tokens.filter((t) => t.bits).length") == tokens - SIZE


def test_files_come_and_go_with_a_key(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "memories", Limits(), key="a-key-of-a-test-0123", host="0.0.0.0") as served:
        page = browser.new_page()
        page.goto(served.url)
        answer(page, "a-key-of-a-test-0123")
        page.wait_for_selector("html[data-ready]", state="attached")
        for name in ("one.txt", "two.txt", "empty.txt"):
            (tmp_path / name).write_text("Some text." * (name != "empty.txt"))
        page.set_input_files("#file", [tmp_path / name for name in ("one.txt", "two.txt", "empty.txt")])
        until(page, "!document.getElementById('wrong').hidden")
        assert "empty.txt: the text is empty" in page.inner_text("#wrong")
        assert page.evaluate("memories.memories.map((memory) => memory.title)") == ["one", "two"]
        with page.expect_download() as download:
            page.click("#download")
        download.value.save_as(tmp_path / "sent.memory")
        page.set_input_files("#file", tmp_path / "sent.memory")
        page.wait_for_selector("#shelf li[data-name='sent'][aria-selected=true]")
        assert page.inner_text("#text") == "Some text."
        page.close()


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
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

"""A headless Chromium for tests of pages: Debian's, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def find_browser() -> str | None:
    """Where Chromium is, if there is one."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-headless-shell")


@contextmanager
def opened(page_file: Path, theme: str = "light", width: int = 1360) -> Iterator[tuple[Any, list[str]]]:
    """The page, opened with no network and ready; and a list that gets everything that goes wrong."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            offline=True,  # type: ignore[arg-type]
        )
        page = context.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        try:
            yield page, problems
        finally:
            browser.close()

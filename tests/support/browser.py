"""Pages in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextmanager
def browser_page(**options: Any) -> Iterator[tuple[Page, list[str]]]:
    """Yield a new page and the list of its console messages and uncaught errors."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)))
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=FLAGS.split()) as browser,
    ):
        page = browser.new_page(**options)
        console: list[str] = []
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        yield page, console

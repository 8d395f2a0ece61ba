"""An installed Chromium, and pages in it that are listened to."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 1e3 * PATIENCE_S


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser without windows."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=WAIT_MS
        )
        yield started
        started.close()


@contextmanager
def watched(
    visitor: Any, own: tuple[str, ...], *, width: int, height: int, scheme: str
) -> Iterator[tuple[Any, list[str]]]:
    """Yield a page, and a list of its complaints and of its requests to others than `own`.

    Args:
        visitor: A browser, for a first visit; or a context of one, which keeps what it has loaded.
        own: How the addresses begin that the page may ask.
        width, height: In pixels.
        scheme: The colours the system prefers: light or dark.
    """
    page = visitor.new_page()  # of a browser: in a context of its own, which ends with it
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    page.set_default_timeout(WAIT_MS)
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(own) else told.append(asked.url))
    try:
        yield page, told
    finally:
        with contextlib.suppress(Exception):  # the browser may be gone already, for the reason the test tells
            page.close()

"""The browser for pages: ``python -m tests.support.browser`` fails without one, and says how to get it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HELP = (
    "no Chromium, or no Playwright to drive it: pip install '.[dev]', and on Debian apt install chromium; "
    "elsewhere playwright install chromium, and CHROMIUM=PATH with the path of its executable"
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
).split()


def chromium() -> str | None:
    """The executable of Chromium; ``None`` without it or without Playwright, which drives it."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """A browser without a window; skips the test where there is none."""
    executable = chromium()
    if executable is None:
        pytest.skip(HELP)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


if __name__ == "__main__":
    sys.exit(None if chromium() else HELP)

"""The browser for pages: ``python -m tests.support.browser`` fails without one, and says how to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

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


if __name__ == "__main__":
    sys.exit(None if chromium() else HELP)

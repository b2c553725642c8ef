"""Each page of the built site in Chromium: links, console, width. ``make test-site`` builds the site."""

import functools
import os
import pathlib
from urllib.parse import unquote, urldefrag

import pytest

from tests.support.browser import started_browser
from tests.support.server import served

SITE = os.environ.get("SITE")
"""The folder of the built site."""

FILES = [str(path.relative_to(SITE)) for path in pathlib.Path(SITE).rglob("*.html")] if SITE else []
PAGES = sorted(name for name in FILES if not name.startswith("_"))
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1300, "height": 900}

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not SITE, reason="SITE does not name a built site")]

FAULTS = ("error", "warning", "assert")
"""The kinds of messages on the console that are faults."""

IDENTIFIERS = "nodes => nodes.map(node => node.id)"
TARGETS = "nodes => nodes.map(node => node.href)"
WIDTH = "() => document.documentElement.scrollWidth"
HIDDEN = """() => [...document.querySelectorAll('article p, article li, article dt, article h1, article h2')]
    .filter(node => node.checkVisibility() && node.getBoundingClientRect().right > innerWidth + 1
        && !node.closest('table, pre, .cell_output'))
    .map(node => node.innerText.slice(0, 80))"""
"""Texts that end to the right of the window, and outside of what scrolls by itself."""


@pytest.fixture(scope="module")
def address():
    with served(SITE) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser):
    context = browser.new_context(viewport=DESKTOP)
    yield context
    context.close()


@pytest.fixture(scope="module")
def identifiers(context, address):
    """A function from a page to the identifiers of its elements."""

    @functools.cache
    def of_page(name):
        page = context.new_page()
        page.goto(address + name, wait_until="domcontentloaded")
        found = {*page.eval_on_selector_all("[id]", IDENTIFIERS)}
        page.close()
        return found

    return of_page


@pytest.fixture
def opened(context, address):
    """Opens a page, which must write no error or warning to the console, and load nothing from elsewhere."""
    page, faults = context.new_page(), []
    page.on("console", lambda message: message.type in FAULTS and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url}"))
    page.on(
        "request",
        lambda request: request.url.startswith((address, "data:")) or faults.append(f"loads {request.url}"),
    )

    def open_page(name):
        page.goto(address + name, wait_until="load")
        return page

    yield open_page
    page.close()
    assert not faults


def test_there_is_a_page_for_every_source():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    assert {str(path.relative_to(docs).with_suffix(".html")) for path in docs.rglob("*.md")} <= {*PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(opened, identifiers, address, name):
    broken = []
    for link in sorted({*opened(name).eval_on_selector_all("a[href]", TARGETS)}):
        url, anchor = urldefrag(link)
        if not url.startswith(address):
            continue
        target = unquote(url.removeprefix(address)) or "index.html"
        has_anchor = not anchor or not target.endswith(".html") or unquote(anchor) in identifiers(target)
        if not ((pathlib.Path(SITE) / target).is_file() and has_anchor):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_the_whole_width(opened, name):
    page = opened(name)
    page.set_viewport_size(PHONE)
    assert page.evaluate(WIDTH) <= PHONE["width"]
    assert not page.evaluate(HIDDEN)

"""Two versions of a small site, published with the configuration of ``docs``, in Chromium."""

import functools
import os

import pytest

from tests.support.browser import started_browser
from tests.support.pages import DOCS
from tests.support.scripts import module_at
from tests.support.server import served

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not os.environ.get("SITE"), reason="make test-site has what builds pages"),
]

PAGES = {
    "index.md": "# Start\n\n```{toctree}\nhow_to/page\n```\n",
    "how_to/page.md": "# A page\n\n[Start](../index.md)\n",
}
publish = module_at(DOCS / "publish.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address and the folder of the site, which is not at the root of its server."""
    folder = tmp_path_factory.mktemp("server")
    with served(folder) as address:
        yield f"{address}project/", folder / "project"


@pytest.fixture(scope="module")
def address(server, tmp_path_factory):
    address, root = server
    source = tmp_path_factory.mktemp("source")
    for name, text in PAGES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    build = functools.partial(publish.build, source)
    publish.publish(root, "/project/", True, build)
    (source / "new.md").write_text("# A new page\n")
    (source / "index.md").write_text(PAGES["index.md"].replace("how_to/page", "how_to/page\nnew"))
    publish.publish(root, "/project/", False, build)
    return address


@pytest.fixture(scope="module")
def page(address):
    with started_browser() as browser:
        page = browser.new_page()
        yield page


def choose(page, name):
    """Chooses a version, and returns the address that it leads to."""
    page.locator(".version-switcher__button").first.click()
    with page.expect_navigation():
        page.locator(".version-switcher__menu a", has_text=name).first.click()
    return page.url


def test_the_root_leads_to_the_newest_state(page, address):
    page.goto(address)
    page.wait_for_url(f"{address}latest/index.html")


def test_a_page_leads_to_itself_in_another_version(page, address):
    release = publish.release_folder()
    page.goto(f"{address}latest/how_to/page.html")
    assert choose(page, release) == f"{address}{release}/how_to/page.html"
    assert page.locator(".version-switcher__button").first.inner_text().strip() == release
    assert choose(page, "latest") == f"{address}latest/how_to/page.html"


def test_a_new_page_leads_to_the_start_of_a_version_without_it(page, address):
    release = publish.release_folder()
    page.goto(f"{address}latest/new.html")
    assert choose(page, release) == f"{address}{release}/"

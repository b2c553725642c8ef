"""Links from page to page lead to a page, and to a heading that it has."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_links_lead_somewhere():
    assert not [(str(page), link) for page in PAGES for link in broken_links(page)]


def test_the_overview_leads_to_every_page_of_the_architecture():
    overview = (ROOT / "docs" / "architecture.md").read_text()
    pages = {path.name for path in (ROOT / "docs" / "architecture").glob("*.md")}
    assert pages == set(re.findall(r"\]\(architecture/(\w+\.md)\)", overview))

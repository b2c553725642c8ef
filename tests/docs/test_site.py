"""Every page is in the table of contents of the site, once, and its code fits its column."""

import re

from tests.support.pages import DOCS


def entries(page):
    """The pages below a page, by its toctrees."""
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL)
    names = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    return [page.parent / f"{name}.md" for name in names]


def below(page):
    for entry in entries(page):
        yield entry
        yield from below(entry)


def test_every_page_is_in_a_toctree():
    # The overview of the architecture leads to its pages: `tests/docs/test_links.py`.
    architecture = {*(DOCS / "architecture").glob("*.md")}
    pages = {*DOCS.rglob("*.md")} - architecture - {DOCS / "index.md"}
    listed = [*below(DOCS / "index.md")]
    assert {*listed} == pages
    assert len(listed) == len(pages)


def test_code_and_tables_fit_the_column_of_a_page():
    wide = []
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"```\{eval-rst\}.*?```", "", page.read_text(), flags=re.DOTALL)
        code = "".join(re.findall(r"```.*?```", text, re.DOTALL)).splitlines()
        rows = [line for line in text.splitlines() if line.startswith("|")]
        wide += [(page.stem, line) for line in code if len(line) > 72]
        wide += [(page.stem, row) for row in rows if len(row) > 160]
    assert not wide

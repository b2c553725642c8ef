"""Every page is in the table of contents of the site, once, and its code fits its column."""

import re

from tests.support.pages import DOCS


def test_code_and_tables_fit_the_column_of_a_page():
    wide = []
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"```\{eval-rst\}.*?```", "", page.read_text(), flags=re.DOTALL)
        code = "".join(re.findall(r"```.*?```", text, re.DOTALL)).splitlines()
        rows = [line for line in text.splitlines() if line.startswith("|")]
        wide += [(page.stem, line) for line in code if len(line) > 72]
        wide += [(page.stem, row) for row in rows if len(row) > 160]
    assert not wide

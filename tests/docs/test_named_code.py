"""Files, folders and names that the pages of the architecture have in code format exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]
CODE = {path for folder in ("mpmd", "cluster", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")}
FILES = {str(path.relative_to(ROOT)) for path in CODE}
WORDS = {
    word for path in CODE if path.suffix in (".py", ".pyi") for word in re.findall(r"\w+", path.read_text())
}

OF_OTHERS = {"RAY_USE_TLS", "SSLSocket", "__jax_array__"}
"""Names of other projects that pages have, and code has not."""


def exists(span):
    """Whether code has what a span in code format names; calls, options and texts are not looked at."""
    if re.fullmatch(r"[\w/]+\.py|[\w/]+/", span):
        return any(f"/{name}".endswith("/" + span.rstrip("/")) for name in FILES)
    return not re.fullmatch(r"[A-Za-z_][\w.]*", span) or set(span.split(".")) <= WORDS | OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_page_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert not [span for span in re.findall(r"`([^`]+)`", text) if not exists(span)]

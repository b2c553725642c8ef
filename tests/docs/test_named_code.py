"""Files, folders and names that pages have in code format exist."""

import functools
import importlib.util
import re
from pathlib import Path

import mpmd

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]
ALL_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS = ("mpmd", "cluster", "tests", "benchmarks", "examples")
CODE = {path for room in ROOMS for path in (ROOT / room).rglob("*")}
FILES = {*ROOMS, *(str(path.relative_to(ROOT)) for path in CODE)}

OF_OTHERS = {"RAY_USE_TLS", "SSLSocket", "__jax_array__"}
"""Names of other projects that pages have, and code has not."""


@functools.cache
def words_of_code():
    sources = (path for path in CODE if path.suffix in (".py", ".pyi"))
    return {word for path in sources for word in re.findall(r"\w+", path.read_text())}


def exists(span, folders):
    """Whether code has what a span in code format names; calls, options and texts are not looked at.

    Args:
      folders: those that the page names, in which files without a folder are.
    """
    if re.fullmatch(r"[\w/]+/", span):
        return span.rstrip("/") in FILES
    if re.fullmatch(r"[\w/]+\.py", span):
        return any(name == span or (name.startswith(folders) and name.endswith(f"/{span}")) for name in FILES)
    return not re.fullmatch(r"[A-Za-z_][\w.]*", span) or set(span.split(".")) <= words_of_code() | OF_OTHERS


def test_names_of_pages_of_the_architecture_exist():
    missing = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        spans = re.findall(r"`([^`]+)`", text)
        folders = tuple(span for span in spans if re.fullmatch(r"[\w/]+/", span))
        missing += [(page.stem, span) for span in spans if not exists(span, folders)]
    assert not missing


def test_names_that_other_pages_take_from_the_library_exist():
    for page in set(ALL_PAGES) - set(PAGES):
        for name in re.findall(r"`(?:\w+ = )?mpmd\.(\w+)", page.read_text()):
            # Packages that are no public names, such as `mpmd.errors`, are attributes once they are imported.
            is_there = hasattr(mpmd, name) or importlib.util.find_spec(f"mpmd.{name}") is not None
            assert is_there, (page.stem, name)


def test_files_that_any_page_names_exist():
    missing = []
    for page in ALL_PAGES:
        named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/]+(?:\.\w+)?)`", page.read_text())
        missing += [(page.stem, name) for name in named if name.rstrip("/") not in FILES]
    assert not missing

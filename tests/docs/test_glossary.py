"""The glossary has every public name, no name that does not exist, and short entries."""

import functools
import re
from pathlib import Path

import cluster
import mpmd
from mpmd.ir.tasks import parse_task
from tests.docs.test_reference import PACKAGES, PUBLIC

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=\n-|\n\n|\n*\Z)", TEXT, re.MULTILINE | re.DOTALL)
NAMES = sorted(set(re.findall(r"`([^`]+)`", " ".join(text for _, text in ENTRIES))))

SOURCES = [path for folder in ("mpmd", "cluster") for path in (ROOT / folder).rglob("*.py")]

PUBLISHED = {name for name in PACKAGES.union(PUBLIC) if not name.startswith("mpmd.checkpoint.")}


@functools.cache
def words_of_code():
    return {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}


def exists(name):
    package, *path = name.split(".")
    if package in ("mpmd", "cluster"):
        try:
            functools.reduce(getattr, path, {"mpmd": mpmd, "cluster": cluster}[package])
        except AttributeError:
            return False
        return True
    if re.fullmatch(r"\w+__\d+", name):
        return str(parse_task(name)) == name
    return set(re.findall(r"\w+", re.sub(r"_\d+$", "", name))) <= words_of_code()


def test_every_public_name_has_an_entry_or_is_in_one():
    assert not PUBLISHED - set(NAMES)


def test_every_name_of_the_glossary_exists():
    assert not [name for name in NAMES if not exists(name)]


def test_terms_have_one_entry_each():
    terms = [term for term, _ in ENTRIES]
    assert len(terms) == len(set(terms)) == TEXT.count("\n- **")


def test_entries_have_two_sentences_at_most():
    assert not [term for term, text in ENTRIES if len(re.findall(r"\.(?=\s|$)", text)) not in (1, 2)]

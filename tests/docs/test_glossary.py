"""The glossary has no name that does not exist, one entry for each word, and short entries."""

import functools
import re
from pathlib import Path

import cluster
import mpmd
from mpmd.ir.tasks import parse_task
from tests.docs.test_named_code import words_of_code

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=\n-|\n\n|\n*\Z)", TEXT, re.MULTILINE | re.DOTALL)
NAMES = sorted(set(re.findall(r"`([^`]+)`", " ".join(text for _, text in ENTRIES))))


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


def test_every_name_of_the_glossary_exists():
    assert not [name for name in NAMES if not exists(name)]


def test_terms_have_one_entry_each():
    terms = [term for term, _ in ENTRIES]
    assert len(terms) == len(set(terms)) == TEXT.count("\n- **")


def test_entries_have_two_sentences_at_most():
    assert not [term for term, text in ENTRIES if len(re.findall(r"\.(?=\s|$)", text)) not in (1, 2)]

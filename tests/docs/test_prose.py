"""The check of prose finds faults on their lines, and leaves code out."""

from pathlib import Path

import pytest

from tests.support.scripts import module_at

pytest.importorskip("proselint")
prose = module_at(Path(__file__).parents[2] / ".ci" / "prose.py")

PAGE = """# A page

We leverage it, and `basically` not.

```python
x = leverage  # of course
```

- An [address](https://hence.example/thus), upon which
  it ends, hence.
"""

CODE = '''"""Seamless."""

simply = "obviously"


def function(x):
    """How it works: a leverage.

    ``of course`` is code, and so is::

        whilst(x)

    upon is not.
    """
    return "thereby"  # of course


CONSTANT = 3
"""A number, easily."""

PLACES = 4
"""Those of the stages."""
'''


def lines_of(faults):
    return [(line, text.split("'")[1]) for line, text in sorted(faults)]


def test_words_of_a_page_have_their_lines():
    words = lines_of(prose.words_in(prose.prose_of_page(PAGE)))
    assert words == [(3, "leverage"), (9, "upon"), (10, "hence")]


def test_words_of_docstrings_have_their_lines():
    words = lines_of(prose.words_in(prose.prose_of_code(CODE)))
    assert words == [(1, "Seamless"), (7, "leverage"), (13, "upon"), (19, "easily")]
    assert lines_of(prose.riddles(CODE)) == [(7, "How"), (22, "Those")]


def test_rows_behind_a_blank_line_have_no_head():
    page = "| a | b |\n|---|--:|\n| 1 | 2 |\n\n| 3 | 4 |\n"
    assert [line for line, _ in prose.rows_without_head(page)] == [5]


def test_faults_are_printed_with_their_places(tmp_path, monkeypatch, capsys):
    """proselint knows a word that is written twice, and numbers are none."""
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nOne of the the pages has 2 2 columns, of course.\n")
    monkeypatch.setattr(prose, "files", lambda: [page])
    with pytest.raises(SystemExit, match="True"):
        prose.main()
    assert capsys.readouterr().out.splitlines() == [
        f"{page}:3: 'of course': leave it out",
        f"{page}:3: There's a lexical illusion in 'the the' - a phrase is repeated.",
    ]

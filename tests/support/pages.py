"""The blocks of code of pages of the site."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def blocks(page):
    """The blocks of Python of a page, by its path below ``docs``, also those that the site does not run."""
    pattern = r"```(?:\{code-cell\} python|python)\n(?::[^\n]*\n\n)?(.*?)```"
    return re.findall(pattern, (DOCS / page).read_text(), re.DOTALL)


def run(blocks, **names):
    """The names after these blocks, which begin with some."""
    names = {"__name__": "__main__", **names}
    for block in blocks:
        exec(block, names)
    return names

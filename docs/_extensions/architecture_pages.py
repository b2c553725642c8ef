"""Puts the pages of the architecture below its overview, in the order of the overview's links.

A toctree in the overview itself would be a block of code to its readers on GitHub.
"""

import re

OVERVIEW = "architecture"


def setup(app):
    app.connect("source-read", add_toctree)
    return {"parallel_read_safe": True}


def add_toctree(app, docname, content):
    if docname == OVERVIEW:
        pages = dict.fromkeys(
            re.findall(rf"\]\(({OVERVIEW}/\w+)\.md\)", content[0])
        )
        content[0] += "\n".join(
            ["\n```{toctree}", ":hidden:", "", *pages, "```", ""]
        )

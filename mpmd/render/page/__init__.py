"""Draws a measured step as a page for a browser: one file that loads nothing.

A ``Subject`` enters: a profile with the causes of its idle time; perhaps an earlier one, to say what changed.
HTML leaves. Start reading in ``schema.py``, the data that Python computes and JavaScript draws.
``profile_data.py`` makes the data from ``lanes.py``, ``tables.py`` and ``memory.py``, and ``document.py``
joins the data with the scripts: ``profile.js`` reads the columns, ``state.js`` has the span in sight and the
selection, ``lanes.js`` and ``pixels.js`` draw the timelines, ``input.js`` is for mouse and keys,
``sections.js`` for the findings and tables, and ``main.js`` begins.
"""

from mpmd.render.page.changes import changes_data
from mpmd.render.page.document import document
from mpmd.render.page.profile_data import page_data
from mpmd.render.page.subject import Subject

__all__ = ["Subject", "page"]


def page(subject: Subject, title: str, before: Subject | None = None) -> str:
    data = page_data(subject)
    if before is not None:
        data["changes"] = changes_data(before, subject)
    return document(data, title)

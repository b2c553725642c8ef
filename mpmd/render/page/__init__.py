"""Draws a measured step, or two beside each other, as a page for a browser: one file that loads nothing.

Subjects enter: profiles with the causes of their idle time. HTML leaves. Start reading in ``schema.py``, the
data between Python, which computes all of it, and JavaScript, which draws. ``profile_data.py`` makes that of
one profile from ``advice.py``, ``lanes.py``, ``tables.py`` and ``memory.py``, ``changes.py`` compares two,
and ``document.py`` joins the data with the scripts: ``profile.js`` reads the columns, ``state.js`` has the
span in sight and the selection, ``lanes.js`` and ``pixels.js`` draw the timelines, ``input.js`` is for mouse
and keys, ``sections.js`` for the tables, and ``main.js`` begins.
"""

from mpmd.render.page.changes import comparison_data
from mpmd.render.page.document import document
from mpmd.render.page.profile_data import profile_data
from mpmd.render.page.schema import PageData
from mpmd.render.page.subject import Subject

__all__ = ["Subject", "page"]


def page(subject: Subject, title: str, before: Subject | None = None) -> str:
    """A step as HTML; with another one ``before``, both and what changed."""
    after = profile_data(subject)
    if before is None:
        return document(PageData(profiles=[after], comparison=None), title)
    first = profile_data(before)
    return document(PageData(profiles=[first, after], comparison=comparison_data(first, after)), title)

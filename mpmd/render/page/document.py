"""The document: the data with the scripts and styles that show it, as one file that loads nothing.

The policy forbids connections, and all scripts and styles except for this package's own, whose hashes it
has. Names from outside enter as JSON without ``<`` and, for the title, as escaped text; the scripts put these
names into text nodes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import re

from mpmd.render.page.schema import PageData
from mpmd.version import __version__

SCRIPTS = (
    "format dom profile pixels state axis selection lanes input overview search memory sections theme main"
).split()
"""The scripts, in the order in which they are joined to one."""

STYLES = ("page", "print")


def document(data: PageData, title: str) -> str:
    script, style = _script(), _style()
    parts = {
        "policy": _policy(script, style),
        "version": html.escape(__version__),
        "title": html.escape(title).encode(errors="replace").decode(),  # names of files may be no Unicode
        "style": style,
        "script": script,
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # In one pass, so that no part is searched for the marks of others.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _file("page.html"))


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _script() -> str:
    """Joins all scripts to one function, so that none of their names are of the window."""
    parts = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@functools.cache
def _style() -> str:
    return "\n".join(_file(f"{name}.css") for name in STYLES)


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

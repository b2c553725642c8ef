"""Objects that show their text in notebooks and terminals."""

from __future__ import annotations

import html
from typing import Any


class ShownAsText:
    """A base of objects that show themselves by a text, ``shown()``: their ``str`` unless they say otherwise.

    A notebook shows it with a fixed width, a terminal as it is. A dataclass of this kind has ``repr=False``.
    """

    def shown(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return self.shown()

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.25">{html.escape(self.shown())}</pre>'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.shown())

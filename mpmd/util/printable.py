"""Text from outside for a terminal, which control characters could change."""

from __future__ import annotations

import os


def printable(text: str | os.PathLike[str]) -> str:
    """The text with each character that is not printable, such as an escape or a line end, escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in os.fspath(text)
    )

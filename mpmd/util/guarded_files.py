"""Files that users name, opened for all readers: they may be damaged, or mean harm. No JAX."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

MOST_BYTES = 2**28
"""The most bytes of a file that are read: more than any profile has."""

MOST_TEXT_BYTES = 2**24
"""The most bytes of a text: more than any schedule or description of a cluster has."""

MOST_LEVELS = 200
"""The most levels of nested JSON: readers recurse, and Python ends at about 1,000 calls."""


class RefusedFileError(OSError):
    """A file that is not read: a device, a pipe, a directory, or larger than any file of its kind."""


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to be read.

    Pipes and devices are refused before they are opened: reading one may never end.

    Raises: ``RefusedFileError``, and ``OSError`` when it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise RefusedFileError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return open(path, "rb")


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise RefusedFileError(errno.EFBIG, f"it has more than {most >> 20} MiB", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises: as ``opened``, and ``ValueError`` for other encodings.
    """
    return read_bytes(path, MOST_TEXT_BYTES).decode("utf-8-sig")


def parse_json(content: str | bytes) -> Any:
    """The data of JSON. Raises ``ValueError`` for other content, and for more levels than ``MOST_LEVELS``."""
    try:
        data = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[Any] = [[data]]
    for _ in range(MOST_LEVELS + 1):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return data
    raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the faults that are found in a file into a ``ValueError`` that names the file."""
    try:
        yield
    except (RefusedFileError, ValueError) as error:
        text = error.strerror if isinstance(error, RefusedFileError) else error
        raise ValueError(f"{path} is damaged: {text}") from None

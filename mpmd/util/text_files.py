"""Text files that users name on the command line: read whole, if they are files at all. No JAX."""

from __future__ import annotations

import errno
import os
import stat

MAX_BYTES = 16 * 2**20
"""The most bytes that are read: more than any schedule or description of a cluster has."""


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Pipes and devices are refused before they are opened: reading one may never end.

    Raises: ``OSError`` for what is no regular file, or has more than ``MAX_BYTES``; ``ValueError`` for other
      encodings.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file: write the text to one", os.fspath(path))
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        text = f"it has more than {MAX_BYTES >> 20} MiB, which is more than a schedule or a cluster has"
        raise OSError(errno.EFBIG, text, os.fspath(path))
    return content.decode("utf-8-sig")

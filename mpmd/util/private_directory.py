"""Directories of executed files, to which nobody but their user may write."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ROOT = 0


def make_private(directory: str) -> None:
    """Makes a directory that only its user may enter, unless it exists, or storage has no users."""
    if "://" not in directory:
        with contextlib.suppress(OSError):  # JAX warns of what it cannot write
            Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)


def fault_of(directory: str) -> str | None:
    """Returns why another user may have written to a directory of executed files, and a remedy; or ``None``.

    The directory and its files have to belong to the user or the administrator, and not be writable by other
    users, as ``ssh`` asks of its keys. A directory that does not exist, and storage without users, such as
    ``gs://``, have no fault.

    ``chmod -R go-rwx`` keeps other users out of the directory; then its files may be writable for them.
    """
    if "://" in directory or not os.path.isdir(directory):
        return None
    status = os.stat(directory)
    if not _is_trusted(status):
        return (
            f"{directory} belongs to the user {_name(status)} (mode {_mode(status)}): use another directory"
        )
    if status.st_mode & _WRITABLE:
        return (
            f"others may write to {directory} of the user {_name(status)} (mode {_mode(status)}): delete it, "
            f"or, if nobody else has written to it, `chmod -R go-rwx {directory}`; or use another directory"
        )
    others_enter = status.st_mode & _OF_OTHERS
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                status = entry.stat()
                if not _is_trusted(status) or (others_enter and status.st_mode & _WRITABLE):
                    return (
                        f"others may have written {entry.path} of the user {_name(status)} "
                        f"(mode {_mode(status)}): delete {directory}, or use another directory"
                    )
    return None


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), _ROOT)


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _name(status: os.stat_result) -> str:
    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return str(status.st_uid)

"""Allows one save to a path at a time: two saves would write to the same directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from etils import epath

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of file systems that lock no files, as some on networks."""


@contextlib.contextmanager
def reserved(directory: epath.Path) -> Iterator[None]:
    """A context in which no other save writes to a new path, except on storage without locks.

    Raises: ``ValueError`` when there is something at the path, or another save to it is under way.
    """
    with contextlib.ExitStack() as undo:
        if "://" not in os.fspath(directory):
            undo.enter_context(_locked(directory))
        if directory.exists():
            raise ValueError(
                f"{directory} exists already: save to another path, or delete it; Orbax's CheckpointManager "
                "numbers checkpoints and keeps the last ones"
            )
        yield


@contextlib.contextmanager
def _locked(directory: epath.Path) -> Iterator[None]:
    """Locks a file beside a path; the system releases the lock when the process ends."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{error.filename} is no directory, so nothing can be saved below it") from error
    lock = f"{directory}.saving"
    descriptor = os.open(lock, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        try:
            _lock(descriptor)
            is_taken = not os.fstat(descriptor).st_nlink  # by a save that has just ended
        except BlockingIOError:
            is_taken = True
        if is_taken:
            raise ValueError(f"{directory} is being saved to: wait for that, or save to another path")
        try:
            yield
        finally:
            with contextlib.suppress(
                FileNotFoundError
            ):  # another save has removed it, where there are no locks
                os.remove(lock)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Raises ``BlockingIOError`` when another process has locked the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise

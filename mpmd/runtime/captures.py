"""Tasks that groups have kept, for the driver to write their operands and results to a directory.

A request with a ``Capture`` has a group keep them. They then live on the group under the handle of the
capture, apart from the values of steps: snapshots do not have them.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np

from mpmd.runtime.requests import Captured


@dataclasses.dataclass(frozen=True)
class KeptTask:
    """A captured task with its values on the host; ``None`` for operands that are lost."""

    captured: Captured
    inputs: tuple[np.ndarray | None, ...]
    results: tuple[np.ndarray, ...]
    error: str | None


def directory_fault(to: Path) -> ValueError | None:
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        return ValueError(f"to: {to} exists; name a directory that does not, or that is empty")
    return _folder_fault("to", to.absolute().parent)


def collection_fault(capture: str | os.PathLike[str] | None) -> ValueError | None:
    return None if capture is None else _folder_fault("capture", Path(capture).absolute())


def _folder_fault(name: str, path: Path) -> ValueError | None:
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        return ValueError(f"{name}: {nearest} is no directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return ValueError(f"{name}: {nearest} is not writable")
    return None


class TaskWriter(Protocol):
    def write(self, kept: KeptTask, to: Path) -> None:
        """Writes a task to a directory, which does not exist or is empty. Raises ``OSError``."""
        ...


class Captures:
    """The captures of a mesh: the writer of each program's tasks, and the directory for tasks that fail.

    Attributes:
      directory: where tasks that fail are written; ``None``: nowhere.
    """

    MOST = 10
    """The most tasks that are written to ``directory``: a loop may go on after each error."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._writers: weakref.WeakValueDictionary[int, TaskWriter] = weakref.WeakValueDictionary()

    def add(self, program: int, writer: TaskWriter) -> None:
        self._writers[program] = writer

    def claim(self) -> Path | None:
        with self._lock:
            if self.directory is None or self._count >= self.MOST:
                return None
            self._count += 1
            return self.directory

    def write(self, program: int, kept: KeptTask, to: Path) -> None:
        """Raises ``RuntimeError`` when the step was dropped meanwhile, ``OSError`` when the task cannot be
        written."""
        writer = self._writers.get(program)
        if writer is None:
            raise RuntimeError("the step that the task belongs to was dropped")
        writer.write(kept, to)

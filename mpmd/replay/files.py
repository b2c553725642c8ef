"""Reads the files of a directory, which may be damaged, or of somebody who means harm.

Sizes are checked before anything is read into memory, nothing is unpickled, and no file is written.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from mpmd.replay.record import (
    EQUATIONS,
    EQUATIONS_JSON,
    FORMAT,
    JSON,
    MOST_DEVICES,
    TASK,
    Equations,
    TaskRecord,
)

MOST_BYTES = 2**26
"""The most bytes of a record, and of a file in a zip file. A task of 3,000 equations has less than 2^20."""

_TOO_LARGE = f"it has more than {MOST_BYTES >> 20} MiB"

_DAMAGES = (KeyError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""The errors of a damaged file in a zip file."""


def read_task(directory: Path) -> TaskRecord:
    """The record of a directory. Loads no JAX.

    Raises: ``ValueError`` when it is of another format, or damaged; ``OSError`` when it cannot be read.
    """
    path = directory / TASK
    if directory.is_dir() and not path.exists():
        raise ValueError(f"{directory} has no {TASK}: it is no directory of a captured task")
    with opened(path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise damage(path, _TOO_LARGE)
    data = _parsed(path, text)
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise ValueError(
            f"{path} has the format {data.get('format')!r}, and this version of mpmd reads format {FORMAT}"
        )
    record: TaskRecord = _loaded(path, TaskRecord, data)
    if min((size for _, size in record.submesh), default=1) < 1 or record.num_devices > MOST_DEVICES:
        raise ValueError(f"{path} is damaged: submesh: no group has the devices {dict(record.submesh)}")
    return record


def read_equations(directory: Path) -> Equations:
    """The equations of a directory. Raises as ``read_task``."""
    path = directory / EQUATIONS
    return _loaded(path, Equations, _parsed(path, read_member(path, EQUATIONS_JSON)))


def read_member(path: Path, name: str) -> bytes:
    """The content of a file in a zip file. Raises ``ValueError`` when it is damaged, or not there."""
    with opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                member = archive.getinfo(name)
                if member.file_size > MOST_BYTES:  # of which no more is read
                    raise ValueError(_TOO_LARGE)
                return archive.read(member)
        except _DAMAGES as error:
            raise damage(path, f"{name}: {error}") from None


def opened(path: Path) -> BinaryIO:
    """A file, opened to be read. Raises ``ValueError`` for a device or a pipe, which may never end."""
    if path.exists() and not path.is_file():
        raise damage(path, "it is no regular file")
    return path.open("rb")


def damage(path: Path, text: str) -> ValueError:
    """The error of a file."""
    return ValueError(f"{path} is damaged: {text}")


def _parsed(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damage(path, str(error)) from None


def _loaded(path: Path, kind: type, data: Any) -> Any:
    try:
        return JSON.load(kind, data)
    except (ValueError, RecursionError) as error:
        raise damage(path, str(error)) from None

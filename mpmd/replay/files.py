"""Reads the files of a directory, which may be damaged, or of somebody who means harm.

Sizes are checked before anything is read into memory, nothing is unpickled, and no file is written.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

from mpmd.replay.record import (
    EQUATIONS,
    EQUATIONS_JSON,
    FORMAT,
    JSON,
    MOST_DEVICES,
    MOST_THREADS,
    TASK,
    Equations,
    TaskRecord,
)
from mpmd.util.guarded_files import naming, parse_json, read_bytes
from mpmd.validation import shown

MOST_BYTES = 2**26
"""The most bytes of a record, and of a file in a zip file. A task of 3,000 equations has less than 2^20."""

_DAMAGES = (KeyError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""The errors of a damaged file in a zip file."""


def read_task(directory: Path) -> TaskRecord:
    """The record of a directory. Loads no JAX.

    Raises: ``ValueError`` when it is of another format, or damaged; ``OSError`` when it cannot be read.
    """
    path = directory / TASK
    if directory.is_dir() and not path.exists():
        raise ValueError(f"{directory} has no {TASK}: it is no directory of a captured task")
    with naming(path):
        data = parse_json(read_bytes(path, MOST_BYTES))
    if isinstance(data, dict) and data.get("format") != FORMAT:
        version = shown(data.get("format"))
        raise ValueError(f"{path} has the format {version}, and this version of mpmd reads format {FORMAT}")
    with naming(path):
        record: TaskRecord = JSON.load(TaskRecord, data)
        if min((size for _, size in record.submesh), default=1) < 1 or record.num_devices > MOST_DEVICES:
            raise ValueError(f"submesh: no group has the devices {shown(record.submesh)}")
        threads = record.environment.get("NPROC", "")
        if threads.isdecimal() and int(threads) > MOST_THREADS:
            raise ValueError(f"environment: no process has NPROC={shown(threads)} threads")
    return record


def read_equations(directory: Path) -> Equations:
    """The equations of a directory. Raises as ``read_task``."""
    path = directory / EQUATIONS
    content = read_member(path, EQUATIONS_JSON)
    with naming(path):
        return JSON.load(Equations, parse_json(content))


def read_member(path: Path, name: str) -> bytes:
    """The content of a file in a zip file. Raises ``ValueError`` when it is damaged, or not there."""
    with naming(path):
        content = io.BytesIO(read_bytes(path, MOST_BYTES))
        try:
            with zipfile.ZipFile(content) as archive:
                member = archive.getinfo(name)
                if member.file_size > MOST_BYTES:  # of which no more is read
                    raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
                return archive.read(member)
        except _DAMAGES as error:
            raise ValueError(f"{name}: {error}") from None

"""Reads the record of a directory, which may be damaged, or of somebody who means harm. Loads no JAX."""

from __future__ import annotations

from pathlib import Path

from mpmd.replay.record import FORMAT, JSON, TASK, TaskRecord
from mpmd.util.guarded_files import naming, parse_json, read_bytes
from mpmd.validation import shown

MOST_BYTES = 2**26
"""The most bytes of a record, and of a module. A task of 3,000 equations has less than 2^20."""

MOST_DEVICES = 2**10
"""The most devices of a group; a record with more devices is damaged, and JAX would not start."""

MOST_THREADS = 2**10
"""The most threads of a group's process, for which JAX makes as many."""


def read_task(directory: Path) -> TaskRecord:
    """The record of a directory.

    Raises: ``ValueError`` when it is of another format, or damaged; ``OSError`` when it cannot be read.
    """
    path = directory / TASK
    if directory.is_dir() and not path.exists():
        raise ValueError(f"{directory} has no {TASK}: it is no directory of a captured task")
    with naming(path):
        data = parse_json(read_bytes(path, MOST_BYTES))
    if isinstance(data, dict) and data.get("format") != FORMAT:
        versions = data.get("versions")
        writer = versions.get("mpmd") if isinstance(versions, dict) else None
        of_writer = f", which mpmd {shown(writer)} wrote," if writer else ""
        raise ValueError(
            f"{path} has the format {shown(data.get('format'))}{of_writer} and this version of mpmd reads "
            f"format {FORMAT}: replay it with the version that wrote it, or capture the task again"
        )
    with naming(path):
        record: TaskRecord = JSON.load(TaskRecord, data)
        if min((size for _, size in record.submesh), default=1) < 1 or record.num_devices > MOST_DEVICES:
            raise ValueError(f"submesh: no group has the devices {shown(record.submesh)}")
        threads = record.environment.get("NPROC", "")
        if threads.isdecimal() and int(threads) > MOST_THREADS:
            raise ValueError(f"environment: no process has NPROC={shown(threads)} threads")
    return record

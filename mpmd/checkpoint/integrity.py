"""The files of a checkpoint: made durable, noted when it is complete, and compared when it is restored.

Each chunk of values has a checksum of its own (``orbax_internals.py``), which its readers compare.
Here are all files and their sizes, and digests of those by which a reader finds the chunks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from etils import epath

from mpmd.errors import DamagedCheckpointError

RECORD = "mpmd_files"
"""The file of the sizes and digests of all others, which begins with a digest of itself. Orbax ignores it."""

_STEP_METADATA = "_CHECKPOINT_METADATA"
_OF_COMMITTING = (_STEP_METADATA, "commit_success.txt")
"""Files that Orbax writes after all others, and that no value depends on."""

_JSON = ("_METADATA", "_sharding", "_strings.json", "array_metadatas/*")

_DATA = "d"
"""The directories of chunks, and of the index of them: both have checksums of their own."""


def write_record(directory: epath.Path) -> None:
    """Writes the record of a checkpoint's files, before Orbax writes its last ones to commit it."""
    files = {name: [path.stat().length, _digest(path)] for name, path in _files(directory)}
    text = json.dumps(files).encode()
    (directory / RECORD).write_bytes(_sha256(text).encode() + b" " + text)


def faults(directory: epath.Path) -> list[str]:
    """The files that differ from the record; without a record, those that are damaged in any case."""
    record = directory / RECORD
    if not record.exists():
        return [fault for name, path in _files(directory) if (fault := _fault_without_record(name, path))]
    digest, _, text = record.read_bytes().partition(b" ")
    if digest != _sha256(text).encode():
        return [f"{record} is not what was written"]
    compared = ((directory / name, *described) for name, described in json.loads(text).items())
    return [fault for row in compared if (fault := _fault(*row))]


def _fault(path: epath.Path, size: int, digest: str | None) -> str | None:
    if not path.exists():
        return f"{path} is missing"
    if path.stat().length != size:
        return f"{path} has {path.stat().length} bytes of {size}"
    return None if _digest(path) == digest else f"{path} is not what was written"


def _fault_without_record(name: str, path: epath.Path) -> str | None:
    if not path.stat().length:
        return f"{path} is empty"
    if any(Path(name).match(pattern) for pattern in _JSON):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return f"{path} is not JSON"
    return None


def _digest(path: epath.Path) -> str | None:
    """The digest of a file's content; ``None`` for chunks, of which a reader does not read all."""
    return None if path.parent.name == _DATA else _sha256(path.read_bytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files(directory: epath.Path, above: str = "") -> Iterator[tuple[str, epath.Path]]:
    """The files of a checkpoint by their paths in it."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from _files(path, f"{above}{path.name}/")
        elif path.name not in (RECORD, *_OF_COMMITTING):
            yield f"{above}{path.name}", path


def damaged(
    directory: epath.Path, faults: Sequence[str], mpmd_idx: int | None = None
) -> DamagedCheckpointError:
    """The error that lists the faults of a checkpoint, and names another one."""
    other = last_whole(directory)
    remedy = (
        "There is no other whole checkpoint beside it"
        if other is None
        else f"The last whole checkpoint beside it is {other}: restore that"
    )
    message = "\n".join([f"the checkpoint {directory} is damaged:", *faults, remedy])
    return DamagedCheckpointError(message, mpmd_idx, None if other is None else str(other))


def last_whole(directory: epath.Path) -> epath.Path | None:
    """The checkpoint of the highest step beside a checkpoint that has all its files.

    Args:
      directory: of a step, such as ``checkpoints/300``, or of an item of one: ``checkpoints/300/state``.
    """
    for step, item in ((directory, ""), (directory.parent, directory.name)):
        is_step = not item or (step / _STEP_METADATA).exists()
        if is_step and (match := _STEP.fullmatch(step.name)):
            others = {
                int(other[2]): path / item
                for path in step.parent.iterdir()
                if path != step and (other := _STEP.fullmatch(path.name)) and other[1] == match[1]
            }
            whole = (others[number] for number in sorted(others, reverse=True) if _is_whole(others[number]))
            return next(whole, None)
    return None


_STEP = re.compile(r"(\D*)(\d+)")
"""The name of the directory of a step: a number, perhaps behind a prefix."""


def _is_whole(directory: epath.Path) -> bool:
    return (directory / "_METADATA").exists() and not faults(directory)


def sync(directory: epath.Path) -> None:
    """Makes all files of a directory, and their names, survive a loss of power."""
    if not _is_local(directory):
        return
    for path, _, names in os.walk(directory):
        for name in names:
            _sync(Path(path, name))
        _sync(Path(path))


def sync_name(directory: epath.Path, since: epath.Path) -> None:
    """Makes the names of a new directory and of those above it survive a loss of power.

    Args:
      since: the nearest directory above it that is not new.
    """
    if not _is_local(directory):
        return
    for parent in directory.parents:
        _sync(Path(parent))
        if parent == since:
            return


def existing(directory: epath.Path) -> epath.Path:
    """The nearest directory above another one that exists."""
    return next((parent for parent in directory.parents if parent.exists()), directory.parent)


def _is_local(path: epath.Path) -> bool:
    """Whether storage is a file system; other storage keeps everything that it has acknowledged."""
    return "://" not in os.fspath(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that cannot sync directories
            raise
    finally:
        os.close(descriptor)

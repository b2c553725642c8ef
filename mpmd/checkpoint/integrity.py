"""Makes a checkpoint's files durable, records them when it is complete, and checks them before a restore.

Each chunk of values has a checksum (``orbax_internals.py``), which its readers compare. The record has the
sizes of all files, and digests of the files by which a reader finds the chunks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tensorstore
from etils import epath

from mpmd.errors import DamagedCheckpointError
from mpmd.util.guarded_files import RefusedFileError, naming, parse_json, read_bytes
from mpmd.util.json_data import JsonFormat

RECORD = "mpmd_files"
"""The record: sizes and digests of the checkpoint's files, after a digest of the record. Orbax ignores it."""

_STEP_METADATA = "_CHECKPOINT_METADATA"
_OF_COMMITTING = (_STEP_METADATA, "commit_success.txt")
"""Files that Orbax writes last, to commit a checkpoint; no value depends on their content."""

_JSON = ("_METADATA", "_sharding", "_strings.json", "array_metadatas/*")

_MOST_BYTES = 2**26
"""The most bytes of a file beside chunks. The tree of 100,000 leaves has half as many."""

_MOST_LEVELS = 32
"""The most nested directories. A chunk has a directory for each dimension of its array."""

_ROWS = Mapping[str, tuple[int, str | None]]
"""The size and the digest of each file."""

_INDEX = "manifest.ocdbt"

_DATA = "d"
"""The name of directories of chunks and of the index of chunks, which both have checksums."""


def write_record(directory: epath.Path) -> None:
    """Writes the record of a checkpoint's files, before Orbax commits the checkpoint."""
    files = {name: [path.stat().length, _digest(name, path)] for name, path in _recorded(directory).items()}
    text = json.dumps(files).encode()
    (directory / RECORD).write_bytes(_sha256(text).encode() + b" " + text)


def faults(directory: epath.Path) -> list[str]:
    """The faults of files that differ from the record; without a record, of empty files and broken JSON.

    Whoever has written a checkpoint may mean harm. So this reads only regular files in the directory itself,
    whatever the record names.
    """
    irregular = [
        f"{path} is no regular file"
        for _, path in _files(directory)
        if _is_local(path) and not stat.S_ISREG(os.lstat(path).st_mode)
    ]
    if irregular:
        return irregular
    files, record = _recorded(directory), directory / RECORD
    try:
        rows = _rows(record) if record.exists() else dict.fromkeys(files, (None, None))
        found = (_fault(directory, name, files.get(name), *row) for name, row in rows.items())
        return [fault for fault in found if fault] or [
            fault for name, path in files.items() if (fault := _fault_of_json(name, path))
        ]
    except (RefusedFileError, ValueError) as error:
        return [str(error)]


def _rows(record: epath.Path) -> _ROWS:
    with naming(record):
        digest, _, text = _content(record).partition(b" ")
        if digest != _sha256(text).encode():
            raise ValueError("it is not what was written")
        return JsonFormat({}).load(_ROWS, parse_json(text))


def _fault(
    directory: epath.Path, name: str, path: epath.Path | None, size: int | None, digest: str | None
) -> str | None:
    """``size`` is ``None`` if the checkpoint has no record."""
    if path is None:
        return f"{directory / name} is missing"
    length = path.stat().length
    if size is None:
        return None if length else f"{path} is empty"
    if length != size:
        return f"{path} has {length} bytes of {size}"
    return None if _digest(name, path) == digest else f"{path} is not what was written"


def _fault_of_json(name: str, path: epath.Path) -> str | None:
    if any(Path(name).match(pattern) for pattern in _JSON):
        try:
            parse_json(_content(path))
        except (RefusedFileError, ValueError) as error:
            return f"{path} is not JSON: {error}"
    return None


def missing(directory: epath.Path) -> Iterator[str]:
    """The files that a checkpoint lacks, by its index of chunks. This reads no chunk.

    Raises: ``OSError`` and ``ValueError`` when the index cannot be read.
    """
    if not (directory / RECORD).exists():
        yield f"{directory / RECORD} is missing"
    if not _is_local(directory) or not (directory / _INDEX).exists():
        return  # other storage loses no files, and a checkpoint without arrays has no index
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()
    root = tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]
    locations: list[str] = [root["location"]] if "location" in root else []
    files: dict[str, int] = {}
    while locations:
        location = locations.pop()
        kind, above, name, start, length = location.split(":")
        files[above + name] = max(files.get(above + name, 0), int(start) + int(length))
        if kind == "btreenode":
            entries = tensorstore.ocdbt.dump(store, location).result()["entries"]
            locations += [place for e in entries if (place := e.get("location") or e.get("indirect_value"))]
    for name, size in files.items():
        if not (file := directory / name).exists() or file.stat().length < size:
            yield f"{file} is missing, or has less than {size} bytes"


def _digest(name: str, path: epath.Path) -> str | None:
    """The digest of a file's content; ``None`` for chunks, which a restore reads only in part.

    Args:
      name: its path in the checkpoint, whose own name may be that of directories of chunks.
    """
    return None if Path(name).parent.name == _DATA else _sha256(_content(path))


def _content(path: epath.Path) -> bytes:
    return read_bytes(path, _MOST_BYTES) if _is_local(path) else path.read_bytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _recorded(directory: epath.Path) -> dict[str, epath.Path]:
    return {name: path for name, path in _files(directory) if path.name not in (RECORD, *_OF_COMMITTING)}


def _files(directory: epath.Path, above: str = "") -> Iterator[tuple[str, epath.Path]]:
    """Yields files, links and too deep directories, by their paths in the checkpoint."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not os.path.islink(path) and above.count("/") < _MOST_LEVELS:
            yield from _files(path, f"{above}{path.name}/")
        else:
            yield f"{above}{path.name}", path


def damaged(
    directory: epath.Path, faults: Sequence[str], mpmd_idx: int | None = None
) -> DamagedCheckpointError:
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
      directory: the directory of a step, such as ``checkpoints/300``, or of its item:
        ``checkpoints/300/state``.
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
    """Makes the names of a new directory, and of new directories above it, survive a loss of power.

    Args:
      since: the nearest directory above ``directory`` that is not new.
    """
    if not _is_local(directory):
        return
    for parent in directory.parents:
        _sync(Path(parent))
        if parent == since:
            return


def existing(directory: epath.Path) -> epath.Path:
    """The nearest directory above ``directory`` that exists."""
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

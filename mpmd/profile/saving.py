"""Files with a plan and recorded times, as JSON."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, TypeVar

from mpmd.ir.tasks import AnyTask, OutsideTask, Task, parse_task
from mpmd.util.guarded_files import parse_json, read_bytes
from mpmd.util.json_data import JsonFormat
from mpmd.validation import shown

FORMAT = "mpmd profile"

VERSION = 2
"""The version of the format, which changes when files of before cannot be read any more."""

_Data = TypeVar("_Data")

_FORMAT = JsonFormat({AnyTask: parse_task, Task | OutsideTask: parse_task})


def write_profile(profile: Any, path: str | os.PathLike[str]) -> None:
    """Writes a profile without its result. Readers of ``path`` find a whole file or none.

    Raises: ``OSError`` when the file cannot be written.
    """
    content = {"format": FORMAT, "version": VERSION, "profile": _FORMAT.dump(type(profile), profile)}
    target = pathlib.Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; name a file in it, such as {target / 'step.json'}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target} cannot be written: there is no directory {target.parent}")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, separators=(",", ":")))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_profile(cls: type[_Data], path: str | os.PathLike[str]) -> _Data:
    """Reads a profile, an instance of ``cls``, that ``write_profile`` has written.

    Raises: ``OSError`` when the file cannot be read, ``ValueError`` when it is no profile, or one of another
      version; both name the file.
    """
    if pathlib.Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory, and no profile, which is a file")
    try:
        content = parse_json(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a profile: it is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a profile, which step.profile(...).save(path) writes")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} is a profile of version {shown(content.get('version'))}, and this release reads version "
            f"{VERSION}; read it with the release that wrote it, or profile again"
        )
    try:
        return _FORMAT.load(cls, content.get("profile"))
    except ValueError as error:
        raise ValueError(f"{path} is a damaged profile: {error}") from None

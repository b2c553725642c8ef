"""Descriptions of clusters as JSON: written, read and checked. Nothing in a file is evaluated."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpmd.planner.curves import Curve
from mpmd.planner.hardware import Hardware, has_default
from mpmd.simulate import Link
from mpmd.util.text_files import read_text
from mpmd.validation import is_number

VERSION = 1
_LINKS = ("device_link", "node_link")


def cluster_data(cluster: Hardware) -> dict[str, Any]:
    """A cluster as data; ``None`` for what is infinite."""
    return {
        name: value.value if isinstance(value, enum.Enum) else _finite(value)
        for name, value in dataclasses.asdict(cluster).items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if value == math.inf else value


def write_cluster(cluster: Hardware, path: str | os.PathLike[str]) -> None:
    """Writes a cluster with the version of the format."""
    text = json.dumps({"version": VERSION, **cluster_data(cluster)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a cluster that a file has; it need not have all, and no version.

    Raises: ``ValueError`` for what is no JSON, for unknown fields, for another version, and for links and
      curves that are none; ``OSError`` for what is no file.
    """
    known = [field.name for field in dataclasses.fields(Hardware)]
    try:
        fields = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    version = fields.pop("version", VERSION) if isinstance(fields, dict) else VERSION
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"{path} has version {version!r} of a cluster, and this is version {VERSION}")
    if not isinstance(fields, dict) or not set(fields) <= set(known):
        raise ValueError(f"{path} must have an object with the fields {', '.join(known)}, got {fields!r}")
    for name in _LINKS:
        if name in fields:
            fields[name] = _link(path, name, fields[name])
    if "rates" in fields:
        fields["rates"] = _rates(path, fields["rates"])
    return fields


def read_cluster(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a whole cluster. Raises as ``read_fields``, and ``ValueError`` for missing fields."""
    fields = read_fields(path)
    needed = [field.name for field in dataclasses.fields(Hardware) if not has_default(field)]
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return fields


def _link(path: str | os.PathLike[str], name: str, fields: Any) -> Link:
    """A link; a bandwidth of ``null`` is infinite."""
    if not isinstance(fields, dict) or set(fields) != {"latency", "bandwidth"} or not _are_numbers(fields):
        raise ValueError(
            f"{path}: {name} must have a latency in seconds and a bandwidth in bytes per second, got "
            f"{fields!r}"
        )
    bandwidth = fields["bandwidth"]
    return Link(fields["latency"], math.inf if bandwidth is None else bandwidth)


def _are_numbers(fields: Mapping[str, Any]) -> bool:
    """Whether all fields of a link are numbers, except for an infinite bandwidth."""
    return all(is_number(value) for name, value in fields.items() if (name, value) != ("bandwidth", None))


def _rates(path: str | os.PathLike[str], rates: Any) -> dict[str, Curve]:
    what = f"{path}: rates must have a rate and a half in operations for each kind and dtype, got {rates!r}"
    if not isinstance(rates, dict):
        raise ValueError(what)
    curves = {}
    for name, fields in rates.items():
        if not isinstance(fields, dict) or not {"rate"} <= set(fields) <= {"rate", "half"}:
            raise ValueError(what)
        if not all(map(is_number, fields.values())):
            raise ValueError(what)
        curves[name] = Curve(**fields)
    return curves

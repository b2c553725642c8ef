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

import numpy as np

from mpmd.planner.curves import Curve
from mpmd.planner.hardware import Hardware, has_default
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.simulate import Link
from mpmd.util.guarded_files import parse_json, read_text
from mpmd.validation import is_number, shown

VERSION, OLDEST_VERSION = 5, 1
_LINKS = ("device_link", "node_link")


def cluster_data(cluster: AnyCluster) -> dict[str, Any]:
    """A cluster as data, of several kinds of devices as ``pools`` and ``link``; ``None`` for infinity."""
    if isinstance(cluster, Pools):
        link = _plain(dataclasses.asdict(cluster.link))
        return {"pools": [cluster_data(pool) for pool in cluster.pools], "link": link}
    return {
        name: value.value if isinstance(value, enum.Enum) else _plain(value)
        for name, value in dataclasses.asdict(cluster).items()
    }


def _plain(value: Any) -> Any:
    """Converts a value for JSON: infinity becomes ``None``, and numbers of numpy become Python numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if value == math.inf:
        return None
    return value.item() if isinstance(value, np.generic) else value


def write_cluster(cluster: AnyCluster, path: str | os.PathLike[str]) -> None:
    """Writes a cluster with the version of the format."""
    text = json.dumps({"version": VERSION, **cluster_data(cluster)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of a cluster from a file; for several kinds of devices, ``pools`` and ``link``.

    A cluster of one kind need not have all fields, and no file needs a version.

    Raises: ``ValueError`` for a file without JSON, for unknown fields, for another version, and for invalid
      links and curves; ``OSError`` for a path without a file.
    """
    try:
        fields = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    version = fields.pop("version", VERSION) if isinstance(fields, dict) else VERSION
    if version not in range(OLDEST_VERSION, VERSION + 1) or isinstance(version, bool):
        raise ValueError(f"{path} has version {shown(version)} of a cluster, and this is version {VERSION}")
    if not isinstance(fields, dict) or "pools" not in fields:
        return _fields(path, fields)
    pools = fields["pools"]
    if not set(fields) <= {"pools", "link"} or not isinstance(pools, list):
        raise ValueError(f"{path} must have a list of pools and the link between them, got {shown(fields)}")
    data: dict[str, Any] = {"pools": [_whole(path, _fields(path, of_pool)) for of_pool in pools]}
    return data | ({"link": _link(path, "link", fields["link"])} if "link" in fields else {})


def _fields(path: str | os.PathLike[str], fields: Any) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(Hardware)]
    if not isinstance(fields, dict) or not set(fields) <= set(known):
        names = ", ".join(known)
        raise ValueError(f"{path} must have an object with the fields {names}, got {shown(fields)}")
    read = {name: _link(path, name, value) if name in _LINKS else value for name, value in fields.items()}
    if "memory" in read and read["memory"] is None:
        read["memory"] = math.inf
    return read | ({"rates": _rates(path, fields["rates"])} if "rates" in fields else {})


def _whole(path: str | os.PathLike[str], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if all that a cluster of one kind needs are there."""
    needed = [field.name for field in dataclasses.fields(Hardware) if not has_default(field)]
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return fields


def read_cluster(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a whole cluster, or its ``pools`` and ``link``.

    Raises: as ``read_file``, and ``ValueError`` for missing fields.
    """
    fields = read_file(path)
    return fields if "pools" in fields else _whole(path, fields)


def _link(path: str | os.PathLike[str], name: str, fields: Any) -> Link:
    """A link; a bandwidth of ``null`` is infinite."""
    if not isinstance(fields, dict) or set(fields) != {"latency", "bandwidth"} or not _are_numbers(fields):
        raise ValueError(
            f"{path}: {name} must have a latency in seconds and a bandwidth in bytes per second, got "
            f"{shown(fields)}"
        )
    bandwidth = fields["bandwidth"]
    return Link(fields["latency"], math.inf if bandwidth is None else bandwidth)


def _are_numbers(fields: Mapping[str, Any]) -> bool:
    """Whether all fields of a link are numbers, except for an infinite bandwidth."""
    return all(is_number(value) for name, value in fields.items() if (name, value) != ("bandwidth", None))


def _rates(path: str | os.PathLike[str], rates: Any) -> dict[str, Curve]:
    what = f"{path}: rates must have a rate and a half for each product or collective, got {shown(rates)}"
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

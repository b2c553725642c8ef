"""Descriptions of clusters as JSON: written, read and checked. Nothing in a file is evaluated.

A file has the fields of ``Hardware`` or of ``Pools``, with ``null`` for infinity.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpmd.memory import Holding
from mpmd.planner.hardware import ALONE_OF_IS_GONE, Hardware
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.util.guarded_files import parse_json, read_text
from mpmd.util.json_data import JsonFormat
from mpmd.validation import shown

VERSION, OLDEST_VERSION = 5, 1

_FORMAT = JsonFormat({Holding: str}, by_hand=True)


def cluster_data(cluster: AnyCluster) -> dict[str, Any]:
    return _plain(dataclasses.asdict(cluster))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if value == math.inf:
        return None
    return value.item() if isinstance(value, np.generic) else value


def write_cluster(cluster: AnyCluster, path: str | os.PathLike[str]) -> None:
    text = json.dumps({"version": VERSION, **cluster_data(cluster)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_cluster(path: str | os.PathLike[str]) -> AnyCluster:
    """Raises: as ``read_fields`` and ``Hardware``, and ``ValueError`` for missing fields."""
    return _load(path, _FORMAT.load)


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of a ``Hardware`` or of a ``Pools`` that a file has. No file needs a version.

    Raises: ``ValueError`` for a file without JSON, for another version, and for fields that are unknown or of
      another type; ``OSError`` for a path without a file.
    """
    return _load(path, _FORMAT.load_fields)


def _load(path: str | os.PathLike[str], load: Any) -> Any:
    try:
        data = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    version = data.pop("version", VERSION) if isinstance(data, dict) else VERSION
    if version not in range(OLDEST_VERSION, VERSION + 1) or isinstance(version, bool):
        raise ValueError(f"{path} has version {shown(version)} of a cluster, and this is version {VERSION}")
    try:
        data = _without_alone_of(data)
        return load(Pools if isinstance(data, dict) and "pools" in data else Hardware, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _without_alone_of(data: Any) -> Any:
    """The data without ``alone_of`` that says nothing, as earlier files of this version have it.

    Raises: ``ValueError`` for ``alone_of`` with numbers.
    """
    if not isinstance(data, dict):
        return data
    if data.get("alone_of"):
        raise ValueError(ALONE_OF_IS_GONE)
    kept = {name: value for name, value in data.items() if name != "alone_of"}
    if isinstance(pools := kept.get("pools"), list):
        kept["pools"] = [*map(_without_alone_of, pools)]
    return kept

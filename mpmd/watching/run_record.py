"""A run at one moment, as its driver describes it to other processes: JSON, of which nothing is executed.

Grammar::

    RunRecord ::= facts  ProcessRecord*  FunctionRecord*
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

_LARGEST = 1e18
"""The largest number in a record: more bytes or seconds than any run has."""

VERSION = 1
"""Of the format; another one is refused."""


@dataclasses.dataclass(frozen=True)
class ProcessRecord:
    """A process of a group.

    Attributes:
      mpmd_idx, rank: which it is.
      node: the address of its machine.
      pid: its number there.
      shares_with: the group whose devices it has, if it has none of its own.
      state: what it is doing, as in ``mesh.status()``; ``None`` before anybody has asked.
      pending: how many requests it has not answered; ``None`` as ``state``.
      host_bytes, device_bytes: the memory of its group's process, and device, that has most, beside the first
        process; ``None`` where it is not known.
    """

    mpmd_idx: int
    rank: int
    node: str
    pid: int
    shares_with: int | None = None
    state: str | None = None
    pending: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class FunctionRecord:
    """The steps of one function; the attributes are as of ``StepCounts``."""

    name: str
    ended: int
    failed: int
    under_way: int
    seconds_per_step: float | None
    seconds_since_end: float | None


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run at one moment.

    Attributes:
      run: its name, which no other has.
      program: the file name of the driver's program.
      node, pid: where the driver runs.
      job: the driver's, in Ray's words.
      platform: of the groups' devices.
      launched: the time of the launch, in seconds since 1970.
      published: how often the driver has described it.
      recoveries, recovery_seconds: their number and duration so far.
      last_recovery: what happened then, in words.
    """

    run: str
    program: str
    node: str
    pid: int
    job: str
    platform: str
    launched: float
    published: int
    recoveries: int
    recovery_seconds: float
    last_recovery: str | None
    processes: tuple[ProcessRecord, ...]
    functions: tuple[FunctionRecord, ...]

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @staticmethod
    def from_json(text: str | bytes) -> RunRecord:
        """The record of a text of ``to_json``; text in it is without control characters.

        Raises: ``ValueError`` for another text, and for one of another version of the format.
        """
        try:
            fields = json.loads(text)
        except RecursionError:
            raise ValueError("not the record of a run: it is nested too deeply") from None
        if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
            raise ValueError(
                f"not the record of a run, or not one of version {VERSION}, as this mpmd reads them"
            )
        return _checked(fields, RunRecord, "the record")


def _checked(value: Any, expected: Any, where: str) -> Any:
    """A value of JSON as a value of an annotated type. Raises ``ValueError`` if it is none."""
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _record(value, expected, where)
    if isinstance(expected, types.UnionType):  # of a type and None
        kind = next(kind for kind in typing.get_args(expected) if kind is not type(None))
        return None if value is None else _checked(value, kind, where)
    if typing.get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(
            _checked(each, typing.get_args(expected)[0], f"{where}[{i}]") for i, each in enumerate(value)
        )
    if expected is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} must be a text")
        return "".join(char if char.isprintable() else " " for char in value)
    if not isinstance(value, int if expected is int else int | float) or isinstance(value, bool):
        raise ValueError(f"{where} must be of type {expected.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite")
    if abs(value) > _LARGEST:
        raise ValueError(f"{where} must be at most {_LARGEST:.0e}")
    return value


def _record(value: Any, expected: type, where: str) -> Any:
    annotations = typing.get_type_hints(expected)
    if not isinstance(value, Mapping) or value.keys() != annotations.keys():
        raise ValueError(f"{where} must have {', '.join(annotations)}, and nothing else")
    return expected(
        **{name: _checked(value[name], kind, f"{where}.{name}") for name, kind in annotations.items()}
    )

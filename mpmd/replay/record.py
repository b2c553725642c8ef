"""The format of a captured task: the files of its directory, and the dataclasses that are in them as JSON.

| file | content |
|---|---|
| ``task.json`` | ``TaskRecord``: the task, its operands and results, what the walk has found, its process |
| ``inputs.npz``, ``results.npz`` | the operands and results by their names in the plan, for ``numpy.load`` |
| ``task.mlir`` | the portable artifact of StableHLO that ``jax.export`` makes of the whole task |

numpy knows no dtypes of ``ml_dtypes``, such as bfloat16: such arrays are raw bytes in the ``.npz`` files, and
``task.json`` has their dtypes. Typed keys are the integers inside. ``mpmd.capture`` writes the files, and
``read_task`` reads the record without JAX: a directory may be damaged, or of somebody who means harm.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

from mpmd.util.guarded_files import naming, parse_json, read_bytes
from mpmd.util.json_data import JsonFormat
from mpmd.validation import shown

FORMAT = 3
"""The version of the format; a reader refuses every other version."""

TASK, INPUTS, RESULTS, MODULE = "task.json", "inputs.npz", "results.npz", "task.mlir"

MOST_BYTES = 2**26
"""The most bytes of a record, and of a module. A task of 3,000 equations has less than 2^20."""

MOST_DEVICES = 2**10
"""The most devices of a group; a record with more devices is damaged, and JAX would not start."""

MOST_THREADS = 2**10
"""The most threads of a group's process, for which JAX makes as many."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""The sharding of an array: an entry for each leading dimension."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of an array in short.

    Attributes:
      low, high: the least and the greatest finite element, of complex numbers by absolute value; ``None``
        where there is none.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    num_nans: int
    num_infs: int

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.low is None:
            text += ", nothing finite"
        elif self.low == self.high:
            text += f", {self.low:g}"
        else:
            text += f", {self.low:g} to {self.high:g}"
        counts = ((self.num_nans, "NaN"), (self.num_infs, "infinite"))
        return text + "".join(f", {count} {name}" for count, name in counts if count)


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of an equation in the user's program.

    Attributes:
      primitive: JAX's name of the operation.
      line: the user's, as ``file:line (function)``; empty where none is known.
      scope: the transformations and named scopes around it.
    """

    primitive: str
    line: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """An equation that makes a NaN or an infinity which none of its operands explains.

    Attributes:
      kind: ``NaN`` or ``infinity``.
      number: how many equations were evaluated before.
      path: the equation, and the loops, branches and calls around it, with their iterations.
      source: its primitive and the user's line.
      operands, results: the ranges of their values.
    """

    kind: str
    number: int
    path: tuple[str, ...]
    source: Source
    operands: tuple[Range, ...]
    results: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The equations of a task, which the driver has evaluated one by one when the task was captured.

    Attributes:
      first: the first equation that makes a NaN or an infinity which is then in a result; where no result
        has any, the first equation that makes one; ``None`` where all is finite, or not finite in the inputs
        already. Results that the task passes on count before residuals that it keeps, and NaNs before
        infinities.
      reaches_result: whether a result has NaNs or infinities that ``first`` makes.
      others: the next equations that make NaNs or infinities, ten at most.
      skipped: the equations that could not be evaluated, each with the reason; last the equation before
        which the time for evaluating ended, if it has.
      count: the number of equations, each as often as it was evaluated.
    """

    first: Origin | None
    reaches_result: bool
    others: tuple[Origin, ...]
    skipped: tuple[tuple[Source, str], ...]
    count: int


@dataclasses.dataclass(frozen=True)
class ValueRecord:
    """An operand or a result of a task.

    Attributes:
      name: the name in the plan.
      dtype: a name of numpy or ``ml_dtypes``.
      spec: the sharding on the group; ``None``: replicated.
      key_impl: the random number generator of typed keys; ``None`` for other values.
      is_stored: whether the bytes are in the directory; ``False`` for a lost operand.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: Spec | None
    key_impl: str | None
    is_stored: bool


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """A captured task.

    Attributes:
      format: the version of the directory.
      task: its name in the plan.
      text: the name with stage, slice and loop, where these are not the number in the name.
      group: the number of its group in the mesh.
      error: the message with which it failed, or its value was refused; ``None`` if it is well.
      inputs, results: its operands and results; results are not stored if it failed before it had any.
      evaluation: its equations one by one; ``None`` if it has not failed and all its results are finite.
      submesh: the axes of the group's devices, each with its size.
      not_exported: the reason why there is no module; empty if there is one.
      platform, device: JAX's name of the platform, and the kind of the group's devices.
      environment: the variables of the group's process on which bits depend.
      versions: JAX, jaxlib, Python and mpmd, and the processor.
      written: the time, as ISO 8601 has it.
    """

    format: int
    task: str
    text: str
    group: int
    error: str | None
    inputs: tuple[ValueRecord, ...]
    results: tuple[ValueRecord, ...]
    evaluation: Evaluation | None
    submesh: tuple[tuple[str, int], ...]
    not_exported: str
    platform: str
    device: str
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    written: str

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.submesh)


JSON = JsonFormat({})


def dump_task(record: TaskRecord) -> str:
    return json.dumps(JSON.dump(TaskRecord, record), separators=(",", ":"))


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

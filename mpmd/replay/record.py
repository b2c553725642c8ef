"""The format of a captured task: the files of its directory, and the dataclasses that are in them as JSON.

| file | content |
|---|---|
| ``task.json`` | ``TaskRecord``: the task, its operands and results, its process, its versions |
| ``inputs.bin`` | the bytes of the operands, one after the other; those that are lost are left out |
| ``results.bin`` | the bytes of the results that are small enough |
| ``equations.zip`` | ``equations.json``: ``Equations``; ``0.mlir``, ...: the modules of its ``exports`` |

A module is a portable artifact of StableHLO, as ``jax.export`` has it, with one function for each equation
that differs from others, or with that of all equations together. Typed keys are the integers inside.
``files.py`` reads the files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

from mpmd.util.json_data import JsonFormat

FORMAT = 2
"""The version of the format; a reader refuses others."""

TASK, INPUTS, RESULTS, EQUATIONS = "task.json", "inputs.bin", "results.bin", "equations.zip"
EQUATIONS_JSON = "equations.json"

MOST_DEVICES = 2**10
"""The most devices of a group; a record with more is damaged, and JAX would not come up with them."""

MOST_THREADS = 2**10
"""The most threads of a group's process, for which JAX makes as many."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""The sharding of an array: an entry for each leading dimension."""


@dataclasses.dataclass(frozen=True)
class ValueRecord:
    """An operand or a result of a task.

    Attributes:
      name: its name in the plan.
      dtype: a name of numpy or ``ml_dtypes``.
      key_impl: the random number generator of typed keys; ``None`` for other values.
      digest: of its bytes; ``None`` if the value is lost.
      is_stored: whether the bytes are in the directory.
      is_passed_on: of results, whether another task, stage or the step's caller gets it; others are kept for
        the backward of the same microbatch.
      num_nans, num_infs: how many of its elements are NaNs and infinities.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    digest: str | None
    is_stored: bool
    is_passed_on: bool
    num_nans: int
    num_infs: int


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """A captured task.

    Attributes:
      format: the version of the directory.
      task: its name in the plan.
      text: that with its stage, slice and loop to users, where these are not the number in the name.
      group: the number of its group in the mesh.
      error: the message with which it failed, or its value was refused; ``None`` if it is well.
      results: without digests if it failed before it had any.
      submesh: the axes of the group's devices, each with its size.
      executable: the name and the types of the executable in the plan.
      without_executable: the reason why the code of the executable is not there; empty if it is.
      platform, device: of the group's devices, as JAX names them, and their kind.
      environment: the variables of the group's process on which bits depend.
      versions: those of JAX, jaxlib, Python and mpmd, and the processor.
      written: the time, as ISO 8601 has it.
    """

    format: int
    task: str
    text: str
    group: int
    error: str | None
    inputs: tuple[ValueRecord, ...]
    results: tuple[ValueRecord, ...]
    submesh: tuple[tuple[str, int], ...]
    executable: str
    without_executable: str
    platform: str
    device: str
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    written: str

    @property
    def num_devices(self) -> int:
        """The number of the group's devices."""
        number = 1
        for _, size in self.submesh:
            number *= size
        return number


class ArrayType(NamedTuple):
    """The type of an array; its spec is ``None`` on one device."""

    dtype: str
    shape: tuple[int, ...]
    spec: Spec | None


@dataclasses.dataclass(frozen=True)
class Export:
    """A function in a portable form.

    Attributes:
      file: the module that it is in.
      function: its name there.
      inputs, outputs: the types of its arguments and results.
      num_devices: one, or those of the group.
      platforms: those that the code is for, as JAX names them.
      calling_convention, uses_global_constants: as of ``jax.export.Exported``.
    """

    file: str
    function: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    num_devices: int
    platforms: tuple[str, ...]
    calling_convention: int
    uses_global_constants: bool


@dataclasses.dataclass(frozen=True)
class Unportable:
    """A function that has no portable form, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of equations.

    Attributes:
      primitive: JAX's name of the operation.
      line: the user's, as ``file:line (function)``; empty where none is known.
      scope: the transformations and named scopes around it.
    """

    primitive: str
    line: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Single:
    """An equation without a body: values that it reads and makes, by their numbers in the block.

    Attributes:
      source: its position among ``Equations.sources``.
      export: the position of its function among ``Equations.exports``.
    """

    source: int
    export: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is written in the program; ``data`` has its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    data: str
    makes: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """A ``lax.scan``: ``num_consts`` operands are the same in all iterations, ``num_carry`` are carried.

    The others are scanned over; results are what is carried, then what is stacked.
    """

    source: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    body: Block


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A ``lax.cond`` or ``lax.switch``: the first operand is the number of the branch that runs."""

    source: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    branches: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class While:
    """A ``lax.while_loop``: operands of ``condition`` alone, operands of ``body`` alone, and the carry."""

    source: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    num_condition_consts: int
    num_body_consts: int
    condition: Block
    body: Block


Equation = Single | Constant | Scan | Conditional | While


@dataclasses.dataclass(frozen=True)
class Block:
    """Equations in order. Values have numbers, which are those of this block alone."""

    inputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Equations:
    """The equations of a task.

    Attributes:
      executable: the position among ``exports`` of all equations together; ``None`` where it is not there.
    """

    sources: tuple[Source, ...]
    block: Block
    exports: tuple[Export | Unportable, ...]
    executable: int | None


JSON = JsonFormat({})
"""Data of these types as JSON."""


def dump_task(record: TaskRecord) -> str:
    """The text of ``task.json``."""
    return json.dumps(JSON.dump(TaskRecord, record), separators=(",", ":"))


def dump_equations(equations: Equations) -> str:
    """The text of ``equations.json``."""
    return json.dumps(JSON.dump(Equations, equations), separators=(",", ":"))

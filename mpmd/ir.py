"""The plan: what every group of devices does in one step, as plain printable data.

The grammar::

    plan         ::= program* executable* input* constant* output*
    program      ::= group instruction*
    instruction  ::= outputs "=" "run" label executable inputs        compute
                   | "send" values "->" group "#" tag                 hand over, keep
                   | values "=" "recv" "<-" group "#" tag             post a receive
                   | "free" values                                    drop the buffers
    executable   ::= name avals "->" avals donated

    task         ::= kind "_" stage "__" microbatch                   fwd_2__1
    cell         ::= task | "FusedTask(" task ("," task)+ ")"
    kind         ::= "fwd" | "bwd" | "bwdA" | "bwdW"

A value has one name in the whole plan; a group that holds a copy of it uses the same name. Every
name is defined once in a program: by an input, a constant, a ``run`` or a ``recv``. The plan holds
no closure, device, handle or jaxpr, so it can be verified, simulated, drawn and shipped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

Name = str
"""Names a value, unique in the plan."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""A ``jax.sharding.PartitionSpec`` as data: one entry per leading dimension."""

TaskKind = Literal["fwd", "bwd", "bwdA", "bwdW"]

_TASK = re.compile(r"(fwd|bwd|bwdA|bwdW)_(\d+)__(\d+)")
_FUSED = re.compile(r"FusedTask\((.*)\)")


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One kind of work of one stage on one microbatch; prints as ``fwd_2__1``."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.stage}__{self.microbatch}"

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (self,)


@dataclasses.dataclass(frozen=True)
class FusedTask:
    """Tasks that run as one executable; prints as ``FusedTask(fwd_3__0, bwd_3__0)``."""

    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self.tasks))})"


Cell = Task | FusedTask
"""What one group does next in a schedule."""


def parse_cell(text: str) -> Cell:
    """Reads back what ``str(cell)`` printed. Raises ``ValueError`` on anything else."""
    text = text.strip()
    if match := _TASK.fullmatch(text):
        kind, stage, microbatch = match.groups()
        return Task(kind, int(stage), int(microbatch))  # type: ignore[arg-type]
    if match := _FUSED.fullmatch(text):
        members = [parse_cell(member) for member in match.group(1).split(",")]
        if len(members) > 1 and all(isinstance(member, Task) for member in members):
            return FusedTask(tuple(members))  # type: ignore[arg-type]
    raise ValueError(
        f"{text!r} is not a task; write e.g. 'fwd_2__1' (stage 2, microbatch 1) or "
        "'FusedTask(fwd_3__0, bwd_3__0)'"
    )


@dataclasses.dataclass(frozen=True)
class Aval:
    """The shape and dtype of a value; ``dtype`` is a numpy (or ml_dtypes) name."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole logical value, before any sharding."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Executable:
    """A program that groups compile once and run many times.

    ``donated`` are the positions of the inputs whose buffers the outputs take over. A spec that is
    ``None`` is left open: the compiler of the group's submesh resolves it.
    """

    name: str
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    donated: tuple[int, ...]
    in_specs: tuple[Spec | None, ...]
    out_specs: tuple[Spec | None, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs an executable. ``label`` is the schedule cell's text, or e.g. ``after_0`` outside the loop."""

    label: str
    executable: str
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = run {self.label} [{self.executable}] {', '.join(self.inputs)}"


@dataclasses.dataclass(frozen=True)
class Send:
    """Sends values to group ``dst`` as one message; ``tag`` counts the messages of the edge."""

    values: tuple[Name, ...]
    dst: int
    tag: int

    def __str__(self) -> str:
        return f"send {', '.join(self.values)} -> {self.dst} #{self.tag}"


@dataclasses.dataclass(frozen=True)
class Recv:
    """Posts the receive of the message with the same ``tag`` from group ``src``."""

    values: tuple[Name, ...]
    src: int
    tag: int

    def __str__(self) -> str:
        return f"{', '.join(self.values)} = recv <- {self.src} #{self.tag}"


@dataclasses.dataclass(frozen=True)
class Free:
    """Drops this group's buffers of the values."""

    values: tuple[Name, ...]

    def __str__(self) -> str:
        return f"free {', '.join(self.values)}"


Instruction = Run | Send | Recv | Free


@dataclasses.dataclass(frozen=True)
class InputLeaf:
    """A leaf of the step's arguments: where the step reads it, and whether it gives it up.

    ``name`` is ``None`` when nothing reads the leaf; then ``mpmd_idxs`` is empty.
    """

    path: str
    name: Name | None
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec
    donated: bool


@dataclasses.dataclass(frozen=True)
class ConstantLeaf:
    """A value known when the step is compiled, held by the groups for the life of the program."""

    name: Name
    aval: Aval
    mpmd_idxs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the step's results: the value it is, and the groups that hold it afterwards."""

    path: str
    name: Name
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec | None


@dataclasses.dataclass(frozen=True)
class GroupProgram:
    """The straight-line program of one group."""

    mpmd_idx: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        lines = [f"group {self.mpmd_idx}:"]
        return "\n".join(lines + [f"  {instruction}" for instruction in self.instructions])


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training step of all groups. ``str(plan)`` is the programs, one instruction a line."""

    programs: tuple[GroupProgram, ...]
    executables: tuple[Executable, ...]
    inputs: tuple[InputLeaf, ...]
    constants: tuple[ConstantLeaf, ...]
    outputs: tuple[OutputLeaf, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.programs))

    def executable(self, name: str) -> Executable:
        """The executable of that name."""
        return next(e for e in self.executables if e.name == name)

    def resident(self, mpmd_idx: int) -> dict[Name, Aval]:
        """The values a group holds before its first instruction: inputs and constants."""
        leaves: tuple[InputLeaf | ConstantLeaf, ...] = (*self.inputs, *self.constants)
        return {leaf.name: leaf.aval for leaf in leaves if leaf.name and mpmd_idx in leaf.mpmd_idxs}

    def avals(self) -> dict[Name, Aval]:
        """The shape and dtype of every value of the plan."""
        leaves: tuple[InputLeaf | ConstantLeaf, ...] = (*self.inputs, *self.constants)
        found = {leaf.name: leaf.aval for leaf in leaves if leaf.name}
        signatures = {e.name: e for e in self.executables}
        for program in self.programs:
            for instruction in program.instructions:
                if isinstance(instruction, Run):
                    outputs = signatures[instruction.executable].outputs
                    found.update(zip(instruction.outputs, outputs, strict=True))
        return found

"""The plan: the program of every group of devices for one step, as plain printable data.

The grammar of its text::

    plan         ::= [part] program* ["loops:" loop*] ["submeshes:" submesh*] "executables:" executable*
                     "inputs:" input* "constants:" constant* "outputs:" output*
    program      ::= "group" group ":" instruction*
    instruction  ::= outputs "=" "run" task "[" executable-name "]" inputs    compute
                   | "send" values "->" group "#" tag                 hand over, keep
                   | values "=" "recv" "<-" group "#" tag             post a receive
                   | "call callback" number "of" task "with" values   hand to the driver, keep
                   | "free" values                                    drop the buffers

    part         ::= "part" name ": its groups" groups "are groups" groups "of the mesh"
    loop         ::= schedule ":" stages "," microbatches     shown where there are several, or slices
    submesh      ::= "group" group ":" (axis size)*           shown where groups differ

    executable   ::= executable-name ":" (type ["donated"])* "->" type* [";" number "bytes temporary"]
    input        ::= path ":" type "on" groups [", donated"]
    constant     ::= name ":" type "on" groups
    output       ::= "result" path "=" name ":" type "on" groups
    type         ::= dtype "[" shape "]" ["sharded" (spec | "?")]     "?": the group's compiler chooses

``tasks.py`` has the grammar of tasks, ``names.py`` the grammar of names. A value has one name in the whole
plan, and a group that holds a copy of the value uses the same name. Each program defines a name once: by an
input, a constant, a ``run`` or a ``recv``. The plan holds no closure, device, handle or jaxpr, so that it can
be verified, simulated, drawn and shipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.loops import LoopStages as LoopStages
from mpmd.ir.loops import cut_lines as cut_lines
from mpmd.ir.loops import loop_lines as loop_lines
from mpmd.ir.loops import with_slice as with_slice
from mpmd.ir.part import Part, part_lines
from mpmd.ir.tasks import AnyTask as AnyTask
from mpmd.ir.tasks import Cell as Cell
from mpmd.ir.tasks import FusedTask as FusedTask
from mpmd.ir.tasks import OutsideTask as OutsideTask
from mpmd.ir.tasks import Task as Task
from mpmd.ir.tasks import TaskKind as TaskKind
from mpmd.ir.tasks import TaskType as TaskType
from mpmd.ir.tasks import parse_cell as parse_cell
from mpmd.ir.tasks import parse_task as parse_task
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import aligned, first_few, human_bytes

Name = str
"""The name of a value, unique in the plan."""

Edge = tuple[int, int]
"""The sending group and the receiving group."""

MessageKey = tuple[Edge, int]
"""The edge and the tag of a message."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""A ``jax.sharding.PartitionSpec`` as data: one entry per leading dimension."""

Submesh = tuple[tuple[str, int], ...]
"""The axes of a group's devices, each with its size."""


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
    """A function that groups compile once and run many times.

    Attributes:
      donated: the positions of the inputs whose buffers the outputs take over.
      in_specs, out_specs: how inputs and outputs are sharded; the compiler of the group's submesh chooses
        specs that are ``None``.
      memory: the bytes that XLA needs, once the groups have compiled the executable.
    """

    name: str
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    donated: tuple[int, ...]
    in_specs: tuple[Spec | None, ...]
    out_specs: tuple[Spec | None, ...]
    memory: ExecutableMemory | None = None

    def __str__(self) -> str:
        inputs = list(map(_typed, self.inputs, self.in_specs))
        for i in self.donated:
            inputs[i] += " donated"
        outputs = map(_typed, self.outputs, self.out_specs)
        needs = f"; {self.memory.temporaries} bytes temporary" if self.memory else ""
        return f"{self.name}: {', '.join(inputs)} -> {', '.join(outputs)}{needs}"


def _typed(aval: Aval, spec: Spec | None) -> str:
    if spec is None:
        return f"{aval} sharded ?"
    return f"{aval} sharded {spec}" if any(spec) else str(aval)


def _on(mpmd_idxs: tuple[int, ...]) -> str:
    return f"on {', '.join(map(str, mpmd_idxs)) or 'no group'}"


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs an executable for a task."""

    task: AnyTask
    executable: str
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]

    @property
    def label(self) -> str:
        return str(self.task)

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = run {self.task} [{self.executable}] {', '.join(self.inputs)}"


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
    """Posts the receive of the message with this ``tag`` from ``src``; the first use of its values waits."""

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


@dataclasses.dataclass(frozen=True)
class HostCall:
    """Hands ``values`` to the driver, which passes them to the user's function ``callback`` for a task."""

    values: tuple[Name, ...]
    callback: int
    task: Task | OutsideTask

    def __str__(self) -> str:
        return f"call callback {self.callback} of {self.task} with {', '.join(self.values)}"


Instruction = Run | Send | Recv | HostCall | Free


@dataclasses.dataclass(frozen=True)
class InputLeaf:
    """A leaf of the step's arguments.

    Attributes:
      path: its name to users, e.g. ``args[0]['w']``.
      name: the value; ``None`` when nothing reads the leaf.
      mpmd_idxs: the groups that read the leaf.
      donated: whether the caller gives up the leaf, so that the step may reuse its buffers.
    """

    path: str
    name: Name | None
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec
    donated: bool

    def __str__(self) -> str:
        donated = ", donated" if self.donated else ""
        return f"{self.path}: {_typed(self.aval, self.spec)} {_on(self.mpmd_idxs)}{donated}"


@dataclasses.dataclass(frozen=True)
class ConstantLeaf:
    """A value that is known when the step is compiled; groups hold it while the program is loaded."""

    name: Name
    aval: Aval
    mpmd_idxs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.aval} {_on(self.mpmd_idxs)}"


@dataclasses.dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the step's results: its value, and the groups that hold the value after the step.

    ``spec`` holds on the first group; a further group replicates a value that does not divide on its submesh.
    """

    path: str
    name: Name
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec | None

    def __str__(self) -> str:
        return f"result{self.path} = {self.name}: {_typed(self.aval, self.spec)} {_on(self.mpmd_idxs)}"


@dataclasses.dataclass(frozen=True)
class GroupProgram:
    """The straight-line program of one group."""

    mpmd_idx: int
    instructions: tuple[Instruction, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(i for i in self.instructions if isinstance(i, Run))

    @property
    def received(self) -> frozenset[Name]:
        """The values that other groups send."""
        return frozenset(name for i in self.instructions if isinstance(i, Recv) for name in i.values)

    def __str__(self) -> str:
        lines = [f"group {self.mpmd_idx}:"]
        return "\n".join(lines + [f"  {instruction}" for instruction in self.instructions])


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(ShownAsText):
    """One training step of all groups. ``str(plan)`` is the whole plan, and begins with the programs.

    A notebook or a terminal shows a summary.

    ``submeshes`` has the axes of each group; if it is empty, each group is one device. Stages are numbered
    through all ``loops``, and through all slices of each. The plan of a part of a mesh has that ``part``.
    """

    programs: tuple[GroupProgram, ...]
    executables: tuple[Executable, ...]
    inputs: tuple[InputLeaf, ...]
    constants: tuple[ConstantLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    submeshes: tuple[Submesh, ...] = ()
    loops: tuple[LoopStages, ...] = ()
    part: Part | None = None

    def __str__(self) -> str:
        lines = [*part_lines(self.part), *map(str, self.programs), *loop_lines(self.loops)]
        if len(set(self.submeshes)) > 1:
            texts = (" ".join(f"{axis} {size}" for axis, size in submesh) for submesh in self.submeshes)
            lines += ["submeshes:", *(f"  group {group}: {text}" for group, text in enumerate(texts))]
        for field in ("executables", "inputs", "constants", "outputs"):
            lines += [f"{field}:", *(f"  {part}" for part in getattr(self, field))]
        return "\n".join(lines)

    def text(self) -> str:
        return str(self)

    def shown(self) -> str:
        """The loops, and a line for each group: its stages, its tasks, its messages, its arguments."""
        header = ("group", "devices", "stages", "tasks", "messages sent", "arguments")
        rows = [header, *(self._summary_row(program) for program in self.programs)]
        loops = [*map(str, self.loops), *cut_lines(self.loops)] or ["no loop"]
        lines = [*part_lines(self.part), *loops, *aligned(rows, left=())]
        return "\n".join([*lines, "plan.text() has all instructions"])

    def _summary_row(self, program: GroupProgram) -> tuple[str, ...]:
        cells = [run.task for run in program.runs if not isinstance(run.task, OutsideTask)]
        stages = sorted({self.on_first_slice(task.stage) for cell in cells for task in cell.tasks})
        sends = sum(isinstance(instruction, Send) for instruction in program.instructions)
        nbytes = sum(leaf.aval.nbytes for leaf in self.inputs_of(program.mpmd_idx).values())
        return (
            str(program.mpmd_idx),
            " ".join(f"{axis} {size}" for axis, size in self.submesh(program.mpmd_idx).items()) or "1",
            first_few(map(str, stages)),
            str(len(program.runs)),
            str(sends),
            human_bytes(nbytes),
        )

    def stage_text(self, stage: int) -> str:
        """The name of a stage to users: ``stage 1``, ``stage 1, slice 2``, or ``stage 1 of loop 0``."""
        loops = ((i, loop) for i, loop in enumerate(self.loops) if stage in loop.stages)
        number, loop = next(loops, (0, None))
        if loop is None:
            return f"stage {stage}"
        return loop.numbers.stage_text(stage, f" of loop {number}" if len(self.loops) > 1 else "")

    def on_first_slice(self, stage: int) -> int:
        """The number of a stage on the first slice of a microbatch; ``stage`` itself without slices."""
        numbers = next((loop.numbers for loop in self.loops if stage in loop.stages), None)
        return numbers.first + numbers.stage_of(stage) if numbers else stage

    def task_text(self, task: AnyTask) -> str:
        """A task as text, with its stage's name to users where there are several loops or slices."""
        has_names = len(self.loops) > 1 or any(loop.slices > 1 for loop in self.loops)
        if isinstance(task, OutsideTask) or not has_names:
            return str(task)
        return f"{task} ({self.stage_text(task.tasks[0].stage)})"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: derived values are not shipped."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def executable(self, name: str) -> Executable:
        return self._executables[name]

    @functools.cached_property
    def _executables(self) -> Mapping[str, Executable]:
        return {executable.name: executable for executable in self.executables}

    def submesh(self, mpmd_idx: int) -> Mapping[str, int]:
        """The sizes of the axes of a group's devices."""
        return dict(self.submeshes[mpmd_idx]) if self.submeshes else {}

    def executables_of(self, mpmd_idx: int) -> tuple[Executable, ...]:
        names = {run.executable for run in self.programs[mpmd_idx].runs}
        return tuple(executable for executable in self.executables if executable.name in names)

    def inputs_of(self, mpmd_idx: int) -> dict[int, InputLeaf]:
        """The inputs that a group reads, by their positions among all inputs."""
        return {i: leaf for i, leaf in enumerate(self.inputs) if leaf.name and mpmd_idx in leaf.mpmd_idxs}

    def outputs_of(self, mpmd_idx: int) -> dict[int, OutputLeaf]:
        """The outputs that a group holds after the step, by their positions among all outputs."""
        return {i: leaf for i, leaf in enumerate(self.outputs) if mpmd_idx in leaf.mpmd_idxs}

    def constants_of(self, mpmd_idx: int) -> tuple[ConstantLeaf, ...]:
        return tuple(leaf for leaf in self.constants if mpmd_idx in leaf.mpmd_idxs)

    def resident(self, mpmd_idx: int) -> dict[Name, Aval]:
        """The values that a group holds before its first instruction: its inputs and constants."""
        inputs, constants = self.inputs_of(mpmd_idx).values(), self.constants_of(mpmd_idx)
        leaves: tuple[InputLeaf | ConstantLeaf, ...] = (*inputs, *constants)
        return {leaf.name: leaf.aval for leaf in leaves if leaf.name}

    def avals(self) -> Mapping[Name, Aval]:
        return self._avals

    @functools.cached_property
    def _avals(self) -> Mapping[Name, Aval]:
        leaves: tuple[InputLeaf | ConstantLeaf, ...] = (*self.inputs, *self.constants)
        avals = {leaf.name: leaf.aval for leaf in leaves if leaf.name}
        for program in self.programs:
            for run in program.runs:
                outputs = self.executable(run.executable).outputs
                for name, aval in zip(run.outputs, outputs, strict=True):
                    avals.setdefault(name, aval)
        return avals

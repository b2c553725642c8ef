"""The operations of a step: the plan's instructions, with names turned into slots of a table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax

from mpmd.errors import NonFiniteError, TaskError
from mpmd.ir.messages import Messages, first_uses
from mpmd.ir.plan import (
    AnyTask,
    Free,
    HostCall,
    Instruction,
    Name,
    OutsideTask,
    Plan,
    Run,
    Send,
    Task,
)
from mpmd.ir.process_times import SendTime, TaskTime, WaitTime
from mpmd.runtime.activity import Activity, ActivityKind
from mpmd.runtime.digests import DigestedMessage, digests_by_device
from mpmd.runtime.nonfinite import NonFinitePolicy, first_refused, passed_on
from mpmd.runtime.recording import Recording
from mpmd.runtime.requests import CallbackOperands
from mpmd.runtime.task_keeper import TaskKeeper
from mpmd.runtime.transport import MessageId, Transport

Compiled = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(slots=True)
class StepState:
    """A step under way.

    Attributes:
      run: the number of the step's run, equal on all groups; it names the step's messages.
      refused, recording, digests, keeper: ``None`` in steps that need none.
      callback_operands: the operands of callbacks so far, still on the devices.
      table: its values by slot.
    """

    run: int
    activity: Activity
    refused: NonFinitePolicy | None = None
    recording: Recording | None = None
    digests: list[DigestedMessage] | None = None
    keeper: TaskKeeper | None = None
    callback_operands: list[CallbackOperands] = dataclasses.field(default_factory=list)
    table: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class RunTask:
    """Calls an executable. Waits for it to end if ``synchronous``, or if the step is recorded.

    ``text`` is the task's name in errors, ``label`` that in traces.
    """

    task: AnyTask
    text: str
    label: str
    mpmd_idx: int
    call: Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    synchronous: bool
    kind: ClassVar[ActivityKind] = ActivityKind.TASK

    def __str__(self) -> str:
        return f"running {self.text}"

    def perform(self, state: StepState) -> None:
        table, recording = state.table, state.recording
        state.activity.now = (self, time.perf_counter())
        before = None if recording is None else (time.perf_counter_ns(), recording.processor_time())
        operands = list(map(table.__getitem__, self.inputs))
        if state.keeper is not None:
            donated = [i for i, slot in enumerate(self.inputs) if slot in self.donated]
            state.keeper.begin(self.label, self.text, operands, donated)
        try:
            with jax.profiler.TraceAnnotation(self.label, group=self.mpmd_idx):
                results = self.call(*operands)
                if results and (self.synchronous or recording is not None):
                    results[-1].block_until_ready()  # an executable's results become ready together
        except Exception as error:
            message = f"{self.text} failed on group {self.mpmd_idx}: {type(error).__name__}: {error}"
            raise TaskError(message, self.mpmd_idx, self.label) from error
        if state.keeper is not None:
            state.keeper.end(self.label, results)
        for slot in self.donated:
            table[slot] = None
        for slot, result in zip(self.outputs, results, strict=True):
            table[slot] = result
        if recording is not None and before is not None:
            start, processor = before
            end, used = time.perf_counter_ns(), recording.processor_time()
            of_task = None if used is None or processor is None else used - processor
            recording.tasks.append(TaskTime(self.task, start, end, of_task))


@dataclasses.dataclass(frozen=True, slots=True)
class SendMessage:
    transport: Transport
    values: tuple[int, ...]
    src: int
    dst: int
    tag: int

    def __str__(self) -> str:
        return f"sending message {self.tag} to group {self.dst}"

    def perform(self, state: StepState) -> None:
        state.activity.now = (self, time.perf_counter())
        start = 0 if state.recording is None else time.perf_counter_ns()
        arrays = list(map(state.table.__getitem__, self.values))
        if state.digests is not None:
            state.digests.append(DigestedMessage(False, self.tag, self.dst, digests_by_device(arrays)))
        self.transport.send(MessageId(state.run, self.src, self.dst, self.tag), arrays)
        if state.recording is not None:
            state.recording.sends.append(SendTime(self.dst, self.tag, start, time.perf_counter_ns()))


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveMessage:
    """Waits for a message, and puts its values into their slots; on the devices if ``on_devices``."""

    transport: Transport
    values: tuple[int, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    src: int
    dst: int
    tag: int
    on_devices: bool

    def __str__(self) -> str:
        return f"waiting for message {self.tag} of group {self.src}"

    def perform(self, state: StepState) -> None:
        state.activity.now = (self, time.perf_counter())
        start = 0 if state.recording is None else time.perf_counter_ns()
        message = MessageId(state.run, self.src, self.dst, self.tag)
        with jax.profiler.TraceAnnotation(f"wait for group {self.src}", group=self.dst):
            received = self.transport.recv(message, self.shardings)
            if self.on_devices:  # once, and not by each task that reads them
                received = jax.device_put(list(received), list(self.shardings))
        if state.digests is not None:
            state.digests.append(DigestedMessage(True, self.tag, self.src, digests_by_device(received)))
        for slot, array in zip(self.values, received, strict=True):
            state.table[slot] = array
        if state.recording is not None:
            arrived, end = self.transport.arrived, time.perf_counter_ns()
            state.recording.waits.append(WaitTime(self.src, self.tag, start, end, arrived))


@dataclasses.dataclass(frozen=True, slots=True)
class TellDriver:
    """Copies values to the host, for the reply of the step."""

    values: tuple[int, ...]
    callback: int
    task: Task | OutsideTask

    def perform(self, state: StepState) -> None:
        arrays = tuple(state.table[slot] for slot in self.values)
        for array in arrays:
            array.copy_to_host_async()
        state.callback_operands.append(CallbackOperands(self.callback, self.task, arrays))


@dataclasses.dataclass(frozen=True, slots=True)
class CheckValues:
    """Looks for NaNs or infinities in the values that a task passes on, in steps that refuse some.

    It comes after the operands of the task's callbacks.
    """

    task: AnyTask
    text: str
    mpmd_idx: int
    values: tuple[int, ...]
    texts: tuple[str, ...]

    def perform(self, state: StepState) -> None:
        assert state.refused is not None, "the executor leaves checks out of other steps"
        position = first_refused([state.table[slot] for slot in self.values], state.refused)
        if position is not None:
            value = self.texts[position]
            message = f"{self.text} on group {self.mpmd_idx} made a value with {state.refused}: {value}"
            operands = [] if state.keeper is None else state.keeper.arrays
            if operands and first_refused(operands, state.refused) is not None:
                message += f". An operand of the task has {state.refused} already"
            raise NonFiniteError(message, self.mpmd_idx, str(self.task))


@dataclasses.dataclass(frozen=True, slots=True)
class FreeValues:
    values: tuple[int, ...]

    def perform(self, state: StepState) -> None:
        for slot in self.values:
            state.table[slot] = None


Operation = RunTask | SendMessage | ReceiveMessage | TellDriver | CheckValues | FreeValues


@dataclasses.dataclass
class Operations:
    """Converts a group's instructions to operations, and assigns slots to their values.

    A message is received right before the first of its values is used: messages arrive without being asked
    for, so there is nothing to do where the plan posts the receive. Values are dropped after the messages
    that follow are sent, for which another group may be waiting.

    Attributes:
      slots: the slots of the names that have a value when the step begins; later names are added.
      shardings: the sharding of each value that the group has.
      synchronous: whether a task is waited for before the next operation.
    """

    plan: Plan
    mpmd_idx: int
    slots: dict[Name, int]
    executables: Mapping[str, Compiled]
    shardings: Mapping[Name, jax.sharding.Sharding]
    transport: Transport
    synchronous: bool

    def __post_init__(self) -> None:
        self._program = self.plan.programs[self.mpmd_idx]
        self._texts = passed_on(self.plan, self._program)
        self._unchecked: list[CheckValues] = []
        self._dead: list[Name] = []

    def __iter__(self) -> Iterator[Operation]:
        *uses, at_end = first_uses(self._program)
        for instruction, messages in zip(self._program.instructions, uses, strict=True):
            yield from self._convert(instruction, messages)
        yield from self._checks()
        yield from self._free()
        yield from self._receive(at_end)  # they are results of the step

    def _convert(self, instruction: Instruction, messages: Messages) -> Iterator[Operation]:
        """The operations of the first use of ``messages``; a free gives its own operation later."""
        if not isinstance(instruction, HostCall):
            yield from self._checks()
        if isinstance(instruction, Run):
            yield from self._free()
        yield from self._receive(messages)
        match instruction:
            case Run():
                yield from self._run(instruction)
            case Send(values, dst, tag):
                slots = self._slots_of(values)
                yield SendMessage(self.transport, slots, src=self.mpmd_idx, dst=dst, tag=tag)
            case HostCall(values, callback, task):
                yield TellDriver(self._slots_of(values), callback, task)
            case Free(values):
                self._dead.extend(values)

    def _slots_of(self, names: Sequence[Name]) -> tuple[int, ...]:
        return tuple(self.slots.setdefault(name, len(self.slots)) for name in names)

    def _run(self, run: Run) -> Iterator[Operation]:
        donated = self.plan.executable(run.executable).donated
        text = self.plan.task_text(run.task)
        yield RunTask(
            task=run.task,
            text=text,
            label=str(run.task),
            mpmd_idx=self.mpmd_idx,
            call=self.executables[run.executable],
            inputs=self._slots_of(run.inputs),
            outputs=self._slots_of(run.outputs),
            donated=self._slots_of([run.inputs[position] for position in donated]),
            synchronous=self.synchronous,
        )
        if passed := [name for name in run.outputs if name in self._texts]:
            texts = tuple(self._texts[name] for name in passed)
            check = CheckValues(run.task, text, self.mpmd_idx, self._slots_of(passed), texts)
            self._unchecked.append(check)

    def _checks(self) -> Iterator[Operation]:
        yield from self._unchecked
        self._unchecked.clear()

    def _free(self) -> Iterator[Operation]:
        if self._dead:
            yield FreeValues(self._slots_of(self._dead))
            self._dead.clear()

    def _receive(self, messages: Messages) -> Iterator[Operation]:
        for ((src, dst), tag), values in messages.items():
            yield from self._free()
            yield ReceiveMessage(
                transport=self.transport,
                values=self._slots_of(values),
                shardings=tuple(self.shardings[name] for name in values),
                src=src,
                dst=dst,
                tag=tag,
                on_devices=not self.synchronous,
            )

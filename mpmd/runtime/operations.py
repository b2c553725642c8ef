"""What a group does in a step, ready to be done: instructions with names turned into slots of a table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mpmd.errors import TaskError
from mpmd.ir import Free, GroupProgram, Name, Plan, Recv, Run, Send
from mpmd.runtime.transport import MessageId, Transport
from mpmd.timeline import Event

Compiled = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(slots=True)
class Step:
    """A step under way: its values by slot, and where to note what happens, if anywhere."""

    number: int
    table: list[Any]
    events: list[Event] | None


@dataclasses.dataclass(frozen=True, slots=True)
class RunTask:
    """Calls an executable. Waits for it to end if ``synchronous``, or if events are noted."""

    label: str
    mpmd_idx: int
    call: Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    synchronous: bool

    def perform(self, step: Step) -> None:
        """Raises ``TaskError`` when the executable fails."""
        table, events = step.table, step.events
        start = time.perf_counter()
        try:
            results = self.call(*[table[slot] for slot in self.inputs])
            if results and (self.synchronous or events is not None):
                results[-1].block_until_ready()  # an executable's results become ready together
        except Exception as error:
            message = f"{self.label} failed on group {self.mpmd_idx}: {type(error).__name__}: {error}"
            raise TaskError(message, self.mpmd_idx, self.label) from error
        for slot in self.donated:
            table[slot] = None
        for slot, result in zip(self.outputs, results, strict=True):
            table[slot] = result
        if events is not None:
            events.append(Event(self.mpmd_idx, self.label, start, time.perf_counter()))


@dataclasses.dataclass(frozen=True, slots=True)
class SendMessage:
    """Hands values to the transport."""

    transport: Transport
    values: tuple[int, ...]
    src: int
    dst: int
    tag: int

    def perform(self, step: Step) -> None:
        arrays = [step.table[slot] for slot in self.values]
        self.transport.send(MessageId(step.number, self.src, self.dst, self.tag), arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class TakeMessage:
    """Waits for a message, and puts its values into their slots."""

    transport: Transport
    values: tuple[int, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    src: int
    dst: int
    tag: int

    def perform(self, step: Step) -> None:
        """Raises ``StepAborted`` when the step fails elsewhere."""
        start = time.perf_counter()
        message = MessageId(step.number, self.src, self.dst, self.tag)
        received = self.transport.recv(message, self.shardings)
        for slot, array in zip(self.values, received, strict=True):
            step.table[slot] = array
        if step.events is not None:
            label = f"wait for group {self.src}"
            step.events.append(Event(self.dst, label, start, time.perf_counter()))


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Drops values."""

    values: tuple[int, ...]

    def perform(self, step: Step) -> None:
        for slot in self.values:
            step.table[slot] = None


Operation = RunTask | SendMessage | TakeMessage | Forget


def resolve(
    program: GroupProgram,
    plan: Plan,
    slots: dict[Name, int],
    executables: Mapping[str, Compiled],
    shardings: Mapping[Name, jax.sharding.Sharding],
    transport: Transport,
    synchronous: bool,
) -> Iterator[Operation]:
    """Turns a group's instructions into operations; new names get the next slots.

    A message is taken right before the first of its values is used: messages arrive without being asked
    for, so there is nothing to do earlier, where the plan posts the receive. Values are dropped after the
    messages that follow are sent, for which another group may be waiting. Other arguments as for
    ``mpmd.runtime.executor.Executor``.
    """
    here = program.mpmd_idx
    donated = {executable.name: executable.donated for executable in plan.executables}
    posted: dict[Name, Recv] = {}
    dead: list[Name] = []

    def slots_of(names: Sequence[Name]) -> tuple[int, ...]:
        return tuple(slots.setdefault(name, len(slots)) for name in names)

    def forget() -> Iterator[Operation]:
        if dead:
            yield Forget(slots_of(dead))
            dead.clear()

    def take(names: Sequence[Name]) -> Iterator[Operation]:
        for recv in dict.fromkeys(posted[name] for name in names if name in posted):
            yield from forget()
            wanted = tuple(shardings[name] for name in recv.values)
            yield TakeMessage(transport, slots_of(recv.values), wanted, recv.src, here, recv.tag)
            for name in recv.values:
                del posted[name]

    for instruction in program.instructions:
        match instruction:
            case Recv(values):
                posted.update(dict.fromkeys(values, instruction))
            case Run(label, executable, inputs, outputs):
                yield from forget()
                yield from take(inputs)
                given = slots_of([inputs[position] for position in donated[executable]])
                call = executables[executable]
                yield RunTask(label, here, call, slots_of(inputs), slots_of(outputs), given, synchronous)
            case Send(values, dst, tag):
                yield from take(values)
                yield SendMessage(transport, slots_of(values), here, dst, tag)
            case Free(values):
                yield from take(values)
                dead.extend(values)
    yield from forget()
    yield from take(tuple(posted))  # they are results of the step

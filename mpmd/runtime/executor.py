"""Runs one group's program: one loop over its instructions, with values in a flat slot table.

The executor is the only owner of a step's buffers. It knows nothing of Ray, of other groups, or of
how a transport moves data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpmd.errors import StepAborted, TaskError
from mpmd.ir import Free, GroupProgram, Name, Plan, Recv, Run, Send
from mpmd.runtime.transport import MessageId, Receipt, Transport
from mpmd.timeline import Event

Compiled = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class _Run:
    label: str
    call: Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Send:
    values: tuple[int, ...]
    dst: int
    tag: int


@dataclasses.dataclass(frozen=True)
class _Recv:
    values: tuple[int, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    src: int
    tag: int


@dataclasses.dataclass(frozen=True)
class _Free:
    values: tuple[int, ...]


@dataclasses.dataclass
class _Pending:
    """A slot whose message has been posted; the first reader waits for it and fills all its slots."""

    receipt: Receipt
    slots: tuple[int, ...]
    src: int


class Executor:
    """One group's program with its executables compiled and its names resolved to slots.

    Args:
      program: the group's instructions.
      plan: the plan the program belongs to.
      executables: for each executable name, the compiled call.
      constants: for each constant of this group, its array.
      shardings: for each value that this group receives, the sharding it shall have.
      transport: this group's end of the edges.
      synchronous: wait for each task to end before going on, so that a failure is that of the task that
        was running. Right where tasks run on the host's own cores; an accelerator's queue is kept full.
    """

    def __init__(
        self,
        program: GroupProgram,
        plan: Plan,
        executables: Mapping[str, Compiled],
        constants: Mapping[Name, jax.Array],
        shardings: Mapping[Name, jax.sharding.Sharding],
        transport: Transport,
        synchronous: bool,
    ):
        self._mpmd_idx = program.mpmd_idx
        self._transport = transport
        self._synchronous = synchronous
        self._slots: dict[Name, int] = {}
        self.input_names = tuple(
            leaf.name for leaf in plan.inputs if leaf.name and self._mpmd_idx in leaf.mpmd_idxs
        )
        self.output_names = tuple(leaf.name for leaf in plan.outputs if self._mpmd_idx in leaf.mpmd_idxs)
        self._inputs = [self._slot(name) for name in self.input_names]
        self._constants = [(self._slot(name), array) for name, array in constants.items()]
        donated = {executable.name: executable.donated for executable in plan.executables}
        self._operations = [
            self._resolve(instruction, executables, donated, shardings)
            for instruction in program.instructions
        ]
        self._outputs = [self._slot(name) for name in self.output_names]

    def _slot(self, name: Name) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _resolve(self, instruction, executables, donated, shardings):
        match instruction:
            case Run(label, executable, inputs, outputs):
                slots = tuple(map(self._slot, inputs))
                consumed = tuple(slots[position] for position in donated[executable])
                return _Run(label, executables[executable], slots, tuple(map(self._slot, outputs)), consumed)
            case Send(values, dst, tag):
                return _Send(tuple(map(self._slot, values)), dst, tag)
            case Recv(values, src, tag):
                wanted = tuple(shardings[name] for name in values)
                return _Recv(tuple(map(self._slot, values)), wanted, src, tag)
            case Free(values):
                return _Free(tuple(map(self._slot, values)))

    def step(
        self, step: int, inputs: Sequence[jax.Array], events: list[Event] | None = None
    ) -> list[jax.Array]:
        """Runs one step.

        Args:
          step: the step's number, equal on all groups; it names the step's messages.
          inputs: the values of ``input_names``. Those the program donates are gone afterwards.
          events: where to note when each task ran and each wait took place; ``None`` notes nothing.

        Returns: the values of ``output_names``.
        Raises: ``TaskError`` when a task fails here, ``StepAborted`` when another group's did.
        """
        table: list[Any] = [None] * len(self._slots)
        for slot, array in self._constants:
            table[slot] = array
        for slot, array in zip(self._inputs, inputs, strict=True):
            table[slot] = array
        for operation in self._operations:
            match operation:
                case _Run():
                    self._run(operation, table, events)
                case _Send(values, dst, tag):
                    arrays = [self._ready(table, slot, events) for slot in values]
                    self._transport.send(MessageId(step, self._mpmd_idx, dst, tag), arrays)
                case _Recv(values, shardings, src, tag):
                    receipt = self._transport.recv(MessageId(step, src, self._mpmd_idx, tag), shardings)
                    pending = _Pending(receipt, values, src)
                    for slot in values:
                        table[slot] = pending
                case _Free(values):
                    for slot in values:
                        table[slot] = None
        return [self._ready(table, slot, events) for slot in self._outputs]

    def _ready(self, table: list[Any], slot: int, events: list[Event] | None) -> jax.Array:
        value = table[slot]
        if isinstance(value, _Pending):
            start = time.perf_counter()
            for filled, array in zip(value.slots, value.receipt.result(), strict=True):
                if table[filled] is value:
                    table[filled] = array
            if events is not None:
                label = f"wait for group {value.src}"
                events.append(Event(self._mpmd_idx, label, start, time.perf_counter()))
            value = table[slot]
        return value

    def _run(self, run: _Run, table: list[Any], events: list[Event] | None) -> None:
        arguments = [self._ready(table, slot, events) for slot in run.inputs]
        start = time.perf_counter()
        try:
            results = run.call(*arguments)
            if self._synchronous or events is not None:
                jax.block_until_ready(results)
        except StepAborted:
            raise
        except Exception as error:
            where = f"{run.label} failed on group {self._mpmd_idx}"
            raise TaskError(f"{where}: {type(error).__name__}: {error}", self._mpmd_idx, run.label) from error
        if events is not None:
            events.append(Event(self._mpmd_idx, run.label, start, time.perf_counter()))
        for slot in run.donated:
            table[slot] = None
        for slot, result in zip(run.outputs, results, strict=True):
            table[slot] = result

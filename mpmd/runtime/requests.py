"""The driver's requests to a group, and the group's replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import OutsideTask, Task
from mpmd.ir.process_times import ProcessTimes
from mpmd.ir.reshard import Box, box_of, intersection, within
from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.digests import ProcessEvents
from mpmd.runtime.nonfinite import NonFinitePolicy

Handle = int
"""The driver's name of a value that lives on groups."""

INLINE_BYTES = 256
"""Results up to this size, a loss or a counter, travel with the reply of the step."""


class Released(NamedTuple):
    """The handles and the numbers of programs that the driver has released since its last request."""

    handles: tuple[Handle, ...] = ()
    programs: tuple[int, ...] = ()

    def and_also(self, other: Released) -> Released:
        """The values and programs that either of the two releases."""
        return Released(self.handles + other.handles, self.programs + other.programs)


NOTHING_RELEASED = Released()


@dataclasses.dataclass(frozen=True)
class LoadReply:
    """The reply of a process of a group that has loaded a program.

    Attributes:
      xla_seconds: how long XLA took.
      memory: the need of each executable, where the backend says it.
      memory_limit: the bytes that each of its devices has.
    """

    xla_seconds: float
    memory: Mapping[str, ExecutableMemory]
    memory_limit: int

    def __or__(self, other: LoadReply) -> LoadReply:
        """The reply of two processes of a group together."""
        both = {name: self.memory[name] | other.memory[name] for name in self.memory.keys() & other.memory}
        limit = min(self.memory_limit, other.memory_limit)
        return LoadReply(max(self.xla_seconds, other.xla_seconds), both, limit)


@dataclasses.dataclass(frozen=True)
class HostSlices:
    """The slices of a host array that the driver sends to one of several processes of a group, for its
    devices.

    Indexing by the shard of a device works as for the whole array.
    """

    shape: tuple[int, ...]
    slices: Mapping[Box, np.ndarray]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        asked = box_of(index, self.shape)
        for box, piece in self.slices.items():
            if intersection(box, asked) == asked:
                return piece[within(asked, box)]
        raise AssertionError(f"{asked} was not sent, but {', '.join(map(str, self.slices))}")


_MOST_VALUES = 2**20
"""The most operands and results of a task."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """A request that a group keep the operands and results of a task of a step.

    Attributes:
      task: the task, as text; ``None``: the task that fails, or that computes a refused value.
      number: a handle that names no value.
    """

    task: str | None
    number: Handle

    def handle(self, position: int) -> Handle:
        """The handle of an operand, or, counted after these, of a result."""
        return -(self.number * _MOST_VALUES + position) - 1


@dataclasses.dataclass(frozen=True)
class Captured:
    """A task of which a group has kept the operands and results.

    Attributes:
      capture: the request.
      mpmd_idx: the group.
      task: its name in the plan.
      text: that with its stage, slice and loop to users, where these are not the number in the name.
      num_inputs, num_results: how many there are; no results where it failed.
      lost: the positions of operands that the task has taken over before it failed.
      platform, device_kind: of the group's devices.
      environment: of the group's process, the variables on which bits depend.
    """

    capture: Capture
    mpmd_idx: int
    task: str
    text: str
    num_inputs: int
    num_results: int
    lost: tuple[int, ...]
    platform: str
    device_kind: str
    environment: Mapping[str, str]

    @property
    def handles(self) -> list[Handle | None]:
        """The handles of operands, ``None`` for the lost ones, and of results."""
        positions = range(self.num_inputs + self.num_results)
        return [None if i in self.lost else self.capture.handle(i) for i in positions]


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """The message from the driver to a group that asks for one step.

    Attributes:
      program: the number of the program to run.
      step: the step's number to people: counts the steps of the mesh, from 1.
      inputs, outputs: a handle for each of the group's inputs and outputs, in plan order.
      host_arrays: the values that the group is sent with this step, which takes them out, so that none is in
        the host's memory and on a device for the whole step.
      transient: the values of ``host_arrays`` that no later step reads; the group drops them after the step.
      released: the values and programs that the group drops before the step.
      donated: the inputs that the step takes over.
      measure_memory: whether the reply is to have the memory in use.
      failed: why the step has failed before: it is not run again, its outputs are lost, its inputs stay.
      groups: the groups that take part in the step, and for which a group may wait; by default, all.
      refused: whether NaNs or infinities are errors; ``None`` if neither are.
      profile: whether the reply is to have the times of the group's processes.
      digests: whether the reply is to have digests of messages.
      capture: the task whose operands and results the group is to keep, if any.
      run: the number of this run of the step, equal on all groups, which names its messages. The runtime sets
        it when it sends the step: the runs of a group ascend, also where a recovery runs a step again.
    """

    program: int
    step: int
    inputs: tuple[Handle, ...]
    outputs: tuple[Handle, ...]
    host_arrays: dict[Handle, np.ndarray] = dataclasses.field(default_factory=dict)
    transient: tuple[Handle, ...] = ()
    released: Released = NOTHING_RELEASED
    donated: tuple[Handle, ...] = ()
    measure_memory: bool = False
    failed: str | None = None
    groups: frozenset[int] | None = None
    refused: NonFinitePolicy | None = None
    profile: bool = False
    digests: bool = False
    capture: Capture | None = None
    run: int = 0

    @property
    def handles(self) -> frozenset[Handle]:
        """The handles of all values that the step reads or makes."""
        return frozenset((*self.inputs, *self.outputs, *self.host_arrays))


@dataclasses.dataclass(frozen=True)
class CallbackOperands:
    """A message of a task to the driver: the number of a callback of the program, and whole operands."""

    callback: int
    task: Task | OutsideTask
    values: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class StepReply:
    """A group's reply to a step.

    Attributes:
      inline: the small results of the group.
      times: the times of the group's processes, if the request has ``profile``.
      callback_operands: the operands of callbacks.
      memory: the memory in use at the end of the step, if the request has ``measure_memory``.
      events: the messages of the group's processes, with digests, if the request has ``digests``.
      captured: the task that was kept, if one was named.
    """

    inline: Mapping[Handle, np.ndarray]
    times: tuple[ProcessTimes, ...] = ()
    callback_operands: tuple[CallbackOperands, ...] = ()
    memory: MemoryUse | None = None
    events: tuple[ProcessEvents, ...] = ()
    captured: Captured | None = None


def operands_on_host(operands: CallbackOperands) -> CallbackOperands:
    """The same operands in the host's memory."""
    return dataclasses.replace(operands, values=tuple(map(np.asarray, operands.values)))


def readable_operands(operands: Iterable[CallbackOperands]) -> Iterator[CallbackOperands]:
    """The operands of calls before a step failed; on accelerators later ones cannot be read."""
    for member in operands:
        try:
            yield operands_on_host(member)
        except RuntimeError:  # the failure of the step, which is being reported
            return


def add_callback_operands(error: BaseException, operands: Sequence[CallbackOperands]) -> None:
    """Adds the operands of callbacks to a step's error, which travels in place of the reply."""
    error.callback_operands = (*getattr(error, "callback_operands", ()), *operands)  # type: ignore[attr-defined]


def callback_operands_of(reply: Future[StepReply]) -> tuple[CallbackOperands, ...]:
    """The operands of callbacks that a group has sent, whether it has finished the step or failed to."""
    error = reply.exception()
    return reply.result().callback_operands if error is None else getattr(error, "callback_operands", ())


def captured_of(reply: Future[StepReply]) -> Captured | None:
    """The task that a group has kept, whether it has finished the step or failed to."""
    error = reply.exception()
    return reply.result().captured if error is None else captured_in(error)


def captured_in(error: BaseException) -> Captured | None:
    """The task that a group has kept which has failed with this error."""
    return getattr(error, "captured", None)


def add_captured(error: BaseException, captured: Captured | None) -> None:
    """Adds the task that a group has kept to a step's error, which travels in place of the reply."""
    error.captured = captured  # type: ignore[attr-defined]

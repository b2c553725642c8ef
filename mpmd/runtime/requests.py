"""The driver's requests to a group, and the group's replies.

``Runtime.ask`` sends requests, ``GroupWorker.answer`` answers them in each process of the group, and
``Request.join`` makes one answer of theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from mpmd.ir.plan import OutsideTask, Spec, Task
from mpmd.ir.process_times import ProcessTimes
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.device_trace import TraceFiles
from mpmd.runtime.digests import DigestedMessages, ProcessDigests
from mpmd.runtime.nonfinite import NonFinitePolicy

Handle = int
"""The driver's name of a value that lives on groups."""

JsonSpec = Mapping[str, Any]
"""A JSON description by which TensorStore opens an array."""

INLINE_BYTES = 256
"""Results up to this size, a loss or a counter, travel with the reply of the step."""


class Released(NamedTuple):
    """The handles and the numbers of programs that the driver has released since its last request."""

    handles: tuple[Handle, ...] = ()
    programs: tuple[int, ...] = ()


NOTHING_RELEASED = Released()


@dataclasses.dataclass(frozen=True)
class Capture:
    """A request that a group keep the operands and results of a task of a step.

    Attributes:
      task: the task, as text; ``None``: the task that fails, or that computes a refused value.
      handle: of the operands and results together.
    """

    task: str | None
    handle: Handle


@dataclasses.dataclass(frozen=True)
class Captured:
    """A task of which a group has kept the operands and results.

    Attributes:
      capture: the request.
      mpmd_idx: the group.
      task: its name in the plan.
      text: that with its stage, slice and loop to users, where these are not the number in the name.
      num_inputs: the number of its operands.
      lost: the positions of operands that the task has taken over before it failed.
      platform, device_kind: of the group's devices.
      environment: of the group's process, the variables on which bits depend.
    """

    capture: Capture
    mpmd_idx: int
    task: str
    text: str
    num_inputs: int
    lost: tuple[int, ...]
    platform: str
    device_kind: str
    environment: Mapping[str, str]


Answer = TypeVar("Answer", covariant=True)


class Request(Generic[Answer]):
    """A message from the driver to a group, which each process of the group answers.

    Attributes:
      beside_steps: the thread of an actor that answers, whatever the group is doing: ``control`` at once,
        ``storage`` after earlier requests of this kind. ``None``: the group answers all such requests in the
        order in which it was asked, steps included.
      is_repeatable: whether a group that recovers is asked again.
    """

    beside_steps: ClassVar[str | None] = None
    is_repeatable: ClassVar[bool] = False

    @property
    def handles(self) -> Collection[Handle]:
        """The handles of all values that the request reads or makes."""
        return ()

    def join(self, answers: Sequence[Any]) -> Answer:
        """Returns the group's answer. ``answers`` has an answer of each process of the group, by rank."""
        return answers[0]


@dataclasses.dataclass(frozen=True)
class StepRequest(Request["StepReply"]):
    """Asks a group for its part of one step.

    Attributes:
      program: the number of the program to run.
      step: the step's number to people: counts the steps of the mesh, from 1.
      inputs, outputs: a handle for each of the group's inputs and outputs, in plan order.
      host_arrays: the values that the group is sent with this step; packed, where it is another process. The
        worker takes them out, so that none is in the host's memory and on a device for the whole step.
      transient: the values of ``host_arrays`` that no later step reads; the group drops them after the step.
      donated: the inputs that the step takes over.
      measure_memory: whether the reply is to have the memory in use.
      failed: why the step has failed before: it is not run again, its outputs are lost, its inputs stay.
      refused: whether NaNs or infinities are errors; ``None`` if neither are.
      profile: whether the reply is to have the times of the group's processes.
      digests: whether the reply is to have digests of messages.
      capture: the task whose operands and results the group is to keep, if any.
      released: the values and programs that the group drops before the step. The runtime sets this and the
        next two attributes when it sends the step.
      groups: the groups that take part in the step, and for which a group may wait; by default, all.
      run: the number of this run of the step, equal on all groups, which names its messages: the runs of a
        group ascend, also where a recovery runs a step again.
    """

    is_repeatable = True

    program: int
    step: int
    inputs: tuple[Handle, ...]
    outputs: tuple[Handle, ...]
    host_arrays: dict[Handle, Any] = dataclasses.field(default_factory=dict)
    transient: tuple[Handle, ...] = ()
    donated: tuple[Handle, ...] = ()
    measure_memory: bool = False
    failed: str | None = None
    refused: NonFinitePolicy | None = None
    profile: bool = False
    digests: bool = False
    capture: Capture | None = None
    released: Released = NOTHING_RELEASED
    groups: frozenset[int] | None = None
    run: int = 0

    @property
    def handles(self) -> Collection[Handle]:
        return (*self.inputs, *self.outputs, *self.host_arrays)

    def join(self, answers: Sequence[StepReply]) -> StepReply:
        if len(answers) == 1:
            return answers[0]
        measured = [reply.memory for reply in answers if reply.memory is not None]
        return dataclasses.replace(
            answers[0],
            times=tuple(times for reply in answers for times in reply.times),
            memory=functools.reduce(operator.or_, measured) if measured else None,
            messages={rank: sent for reply in answers for rank, sent in reply.messages.items()},
        )


@dataclasses.dataclass(frozen=True)
class Fetch(Request[Any]):
    """Asks for the value under a handle: the jax array in process, a numpy array from elsewhere.

    Under the handle of a ``Capture`` is a tuple of arrays: the operands that are not lost, then the results.
    Raises ``LostValueError`` when the step that makes the value has failed.
    """

    is_repeatable = True

    handle: Handle

    @property
    def handles(self) -> Collection[Handle]:
        return (self.handle,)


class StoredArray(NamedTuple):
    opened_by: JsonSpec
    dtype: np.dtype
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Read(Request["StepReply"]):
    """Asks each process to read, from storage, the shards of values that its devices are to hold.

    The reply has no results.
    """

    is_repeatable = True

    stored: Mapping[Handle, StoredArray]

    @property
    def handles(self) -> Collection[Handle]:
        return self.stored.keys()


@dataclasses.dataclass(frozen=True)
class CopyOut(Request[None]):
    """Asks for copies of values in host memory, under the handle ``copy``, until ``Write`` or a release.

    Steps that are submitted afterwards may take the values over. Raises ``LostValueError`` as ``Fetch``.
    """

    is_repeatable = True

    copy: Handle
    values: tuple[Handle, ...]

    @property
    def handles(self) -> Collection[Handle]:
        return (self.copy, *self.values)


@dataclasses.dataclass(frozen=True)
class Write(Request[list[int]]):
    """Asks each process to write its shards of the values that ``CopyOut`` has copied, while steps run.

    The copy is gone afterwards. The answer is the number of bytes that each process has written.

    Attributes:
      copy: the handle of ``CopyOut``.
      specs: for each process of the group, TensorStore's specification of the array that it writes, by value.
    """

    beside_steps = "storage"

    copy: Handle
    specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]

    @property
    def handles(self) -> Collection[Handle]:
        return (self.copy,)

    def join(self, answers: Sequence[int]) -> list[int]:
        return list(answers)


@dataclasses.dataclass(frozen=True)
class Release(Request[None]):
    """Asks a group to drop values, copies and programs now, rather than before its next step.

    Without any, the answer says that the group has done all that it was asked before.
    """

    released: Released = NOTHING_RELEASED


@dataclasses.dataclass(frozen=True)
class Digests(Request[tuple[ProcessDigests, ...]]):
    """Asks for the digests of all values that live on a group, after the steps submitted before."""

    def join(self, answers: Sequence[ProcessDigests]) -> tuple[ProcessDigests, ...]:
        return tuple(answers)


@dataclasses.dataclass(frozen=True)
class Analyses(Request[Mapping[str, ExecutableAnalysis]]):
    """Asks for XLA's analysis of each executable of a program that the group runs, by its name."""

    program: int


@dataclasses.dataclass(frozen=True)
class MeasuredPeak(Request["int | None"]):
    """Asks for the most bytes that were ever allocated on one device of the group.

    ``None`` where the backend's allocator does not count them.
    """

    beside_steps = "control"

    def join(self, answers: Sequence[int | None]) -> int | None:
        return None if None in answers else max(answers)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class StartTrace(Request[None]):
    """Starts ``jax.profiler`` in the group's processes. Raises ``RuntimeError`` where it is running."""


@dataclasses.dataclass(frozen=True)
class StopTrace(Request[Mapping[str, TraceFiles]]):
    """Ends the traces, and asks for the files of each process, by its name.

    Raises ``RuntimeError`` when a process was not traced.
    """

    def join(self, answers: Sequence[Mapping[str, TraceFiles]]) -> Mapping[str, TraceFiles]:
        return {name: files for answer in answers for name, files in answer.items()}


@dataclasses.dataclass(frozen=True)
class CallbackOperands:
    """A message of a task to the driver: the number of a callback of the program, and whole operands."""

    callback: int
    task: Task | OutsideTask
    values: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class StepReply:
    """A group's reply to a step, with the parts for which ``StepRequest`` asks.

    Attributes:
      inline: the results of at most ``INLINE_BYTES``.
    """

    inline: Mapping[Handle, np.ndarray]
    times: tuple[ProcessTimes, ...] = ()
    callback_operands: tuple[CallbackOperands, ...] = ()
    memory: MemoryUse | None = None
    messages: DigestedMessages = dataclasses.field(default_factory=dict)
    captured: Captured | None = None


def operands_on_host(operands: CallbackOperands) -> CallbackOperands:
    return dataclasses.replace(operands, values=tuple(map(np.asarray, operands.values)))


def readable_operands(operands: Iterable[CallbackOperands]) -> Iterator[CallbackOperands]:
    """The operands of calls before a step failed; on accelerators later ones cannot be read."""
    for member in operands:
        try:
            yield operands_on_host(member)
        except RuntimeError:  # the failure of the step, which is being reported
            return


def add_reply(error: BaseException, reply: StepReply) -> None:
    """Adds what a group has sent until then to the error of a step, which travels in place of the reply."""
    error.reply = reply  # type: ignore[attr-defined]


def reply_of(reply: Future[StepReply]) -> StepReply:
    error = reply.exception()
    return reply.result() if error is None else sent_with(error)


def sent_with(error: BaseException) -> StepReply:
    return getattr(error, "reply", None) or StepReply({})

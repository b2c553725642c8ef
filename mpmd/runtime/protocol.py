"""The groups as the driver sees them, wherever they live."""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Edge, Plan
from mpmd.memory import Holding
from mpmd.program import Program
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.callbacks import CallbackThreads
from mpmd.runtime.captures import Captures, KeptTask
from mpmd.runtime.compiling import LoadReply
from mpmd.runtime.in_flight import MAX_IN_FLIGHT, StepsInFlight
from mpmd.runtime.requests import (
    NOTHING_RELEASED,
    Answer,
    Captured,
    Fetch,
    Handle,
    Release,
    Released,
    Request,
    StepRequest,
)
from mpmd.runtime.step_meter import StepMeters


@dataclasses.dataclass(frozen=True)
class LoadedProgram:
    """A program that all groups have compiled.

    Attributes:
      number: its number in step requests.
      program: the program, with the specs that it left open, and without functions and constants.
      seconds: how long it took, by pass: ``resolve``, in which groups compile if specs are open; ``export``,
        where functions travel to other processes; ``load``, until the last group had compiled.
      replies: the reply of each group that takes part; groups compile at the same time.
      holdings: where the messages of an edge are until they are used; in the receiver's memory where it does
        not say.
    """

    number: int
    program: Program
    seconds: Mapping[str, float]
    replies: Mapping[int, LoadReply]
    holdings: Mapping[Edge, Holding]

    @property
    def plan(self) -> Plan:
        memory: dict[str, ExecutableMemory] = {}
        for reply in self.replies.values():
            for name, needed in reply.memory.items():
                memory[name] = memory.get(name, needed) | needed
        plan = self.program.plan
        known = (dataclasses.replace(e, memory=memory.get(e.name)) for e in plan.executables)
        return dataclasses.replace(plan, executables=tuple(known))


class Runtime(abc.ABC):
    """The groups of one mesh, as the driver sees them. Requests to groups go through ``ask``.

    Attributes:
      arguments: knows which arguments the groups keep for later calls.
      callbacks: make the calls that steps ask of the driver.
      next_handle: returns a number never given before on this runtime; numbers ascend.
      next_step: returns the number of the next step that is submitted; the first is 1.
      meters: count the steps of each function.
      in_flight: how many more steps may be submitted; who asks for a step enters it before.
      goes_back: whether groups go back to before a step that has failed, so that the values that it has
        taken over exist again.
      left_out: the groups that do not go back then.
      last_checkpoint: the path of the last checkpoint that ``mpmd.save`` has completed here, or from which
        groups have read; who saves and restores keeps it up to date.
      is_closed: whether ``close`` was called: nothing can be asked any more.
      captures: writes tasks that groups have kept.
      traced_groups: of the groups that share their processes, the first: ``jax.profiler`` runs in a process.
    """

    goes_back = False
    left_out: frozenset[int] = frozenset()
    last_checkpoint: str | None = None
    is_closed = False

    def __init__(self, processes_per_group: Sequence[int], max_in_flight: int = MAX_IN_FLIGHT):
        self._process = os.getpid()
        self.processes_per_group = tuple(processes_per_group)
        num_groups = len(self.processes_per_group)
        self.callbacks = CallbackThreads()
        self.meters = StepMeters()
        self.captures = Captures()
        self.in_flight = StepsInFlight(max_in_flight)
        self.traced_groups: Sequence[int] = range(num_groups)
        self.next_handle: Callable[[], Handle] = itertools.count().__next__
        self.next_step: Callable[[], int] = itertools.count(1).__next__
        self._runs = itertools.count(1)
        self._programs = itertools.count()
        self._participants: dict[int, tuple[int, ...]] = {}  # of each program
        self._released = ReleaseQueue(num_groups)
        # It gets no method of this object, which would then live until the garbage collector finds it.
        self.arguments = ArgumentCache(self.next_handle, self._released.add_handle, num_groups)

    @property
    def attempt(self) -> int:
        """A number that changes when groups go back, or are about to, to run steps again."""
        return 0

    def check_process(self) -> None:
        """Raises ``RuntimeError`` in a fork of the process that has made the runtime."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} is a fork of process {self._process}, which has the mesh: from "
                "here no group can be reached. Run steps and read results there, and start processes that "
                "need a mesh of their own by multiprocessing's method 'spawn'"
            )

    @abc.abstractmethod
    def load(self, program: Program) -> LoadedProgram:
        """Loads a program: each group with a part in it compiles its own.

        Waits for all; if one fails, none keeps it.
        """

    def ask(self, requests: Mapping[int, Request[Answer]]) -> dict[int, Future[Answer]]:
        """Sends requests of one kind to groups. Returns at once, with the future of each group's answer.

        A group carries out its requests in the order in which it was asked, unless ``Request.beside_steps``.
        ``StepRequest``s are one step: a request for each group that takes part. Other groups are told their
        releases, if there are any.

        A future raises ``GroupDiedError`` when the group's process is gone. The future of a step raises
        ``TaskError`` when a task of that group failed, and ``StepAborted`` when another group's did.

        Raises: ``RuntimeError`` in a fork, and for a mesh in this process after ``close``.
        """
        self.check_process()
        if any(isinstance(request, StepRequest) for request in requests.values()):
            return self._submit_step(requests)  # type: ignore[arg-type]
        return {mpmd_idx: self._ask_group(mpmd_idx, request) for mpmd_idx, request in requests.items()}

    @abc.abstractmethod
    def _submit_step(self, requests: Mapping[int, StepRequest]) -> dict[int, Future[Any]]: ...

    @abc.abstractmethod
    def _ask_group(self, mpmd_idx: int, request: Request[Answer]) -> Future[Answer]: ...

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[Any]:
        return self.ask({mpmd_idx: Fetch(handle)})[mpmd_idx]

    def fetch_kept(self, captured: Captured, error: BaseException | None) -> KeptTask:
        """Fetches a captured task's operands and results, and has the group drop them.

        Raises: what ``fetch`` raises, as when the group has died.
        """
        try:
            values = self.fetch(captured.mpmd_idx, captured.capture.handle).result()
        finally:
            self.drop_kept(captured)
        arrays = map(np.asarray, values)
        return KeptTask(
            captured=captured,
            inputs=tuple(None if i in captured.lost else next(arrays) for i in range(captured.num_inputs)),
            results=tuple(arrays),
            error=None if error is None else str(error),
        )

    def drop_kept(self, captured: Captured) -> None:
        self.free((captured.mpmd_idx,), captured.capture.handle)

    def wait_to_submit(self, mpmd_idxs: Collection[int]) -> None:  # noqa: B027
        """Waits until ``ask`` does not block for a step of ``mpmd_idxs``. While groups recover, it blocks.

        Within ``ask``, an interrupt has to wait, too.
        """

    @abc.abstractmethod
    def unload(self, number: int) -> None:
        """Makes the groups drop a program, after the steps submitted before.

        Groups are told with their next request, or earlier. Callable at any point of any thread, even from
        garbage collection, and after ``close``.
        """

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        """Drops a value, or a copy of values: groups are told with their next step.

        Callable as ``unload`` is.
        """
        self._released.add_handle(mpmd_idxs, handle)

    @abc.abstractmethod
    def close(self) -> None: ...

    def _tell_released(self, but: Collection[int] = ()) -> None:
        """Tells groups, except ``but``, which values and programs to drop now, before their next step."""
        for group in range(len(self.processes_per_group)):
            if group not in but and (released := self._released.take(group)) != NOTHING_RELEASED:
                self._ask_group(group, Release(released))


class ReleaseQueue:
    """For each group the releases of the driver that the group was not yet told.

    Releases come from garbage collection, at any point of any thread: a deque's append needs no lock.
    """

    def __init__(self, num_groups: int):
        self._handles = [collections.deque[Handle]() for _ in range(num_groups)]
        self._programs = [collections.deque[int]() for _ in range(num_groups)]

    def add_handle(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        for mpmd_idx in mpmd_idxs:
            self._handles[mpmd_idx].append(handle)

    def add(self, mpmd_idx: int, released: Released) -> None:
        self._handles[mpmd_idx].extend(released.handles)
        self._programs[mpmd_idx].extend(released.programs)

    def take(self, mpmd_idx: int) -> Released:
        return Released(_drain(self._handles[mpmd_idx]), _drain(self._programs[mpmd_idx]))


def _drain(released: collections.deque[int]) -> tuple[int, ...]:
    """Empties the deque and returns its numbers. Several threads may do this at once: each number goes to
    one thread."""
    drained: list[int] = []
    while True:
        try:
            drained.append(released.popleft())
        except IndexError:
            return tuple(drained)

"""The groups as the driver sees them, wherever they live."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import jax
import numpy as np

from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Edge, Plan
from mpmd.memory import Holding
from mpmd.program import Program
from mpmd.runtime.argument_cache import ArgumentCache
from mpmd.runtime.callbacks import CallbackThreads
from mpmd.runtime.captures import Captures
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.device_trace import TraceFiles
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.in_flight import MAX_IN_FLIGHT, StepsInFlight
from mpmd.runtime.requests import NOTHING_RELEASED, Handle, LoadReply, Released, StepReply, StepRequest
from mpmd.runtime.step_meter import StepMeters
from mpmd.runtime.storage import JsonSpec, StoredArray


@dataclasses.dataclass(frozen=True)
class LoadedProgram:
    """A program that all groups have compiled.

    Attributes:
      number: its number in step requests.
      program: the program, with the specs that it left open, and without functions and constants.
      seconds: how long it took, by pass: ``resolve``, in which groups compile if specs are open; ``export``,
        where functions travel to other processes; ``load``, until the last group had compiled.
      xla_seconds: for each group, how long XLA compiled; groups compile at the same time.
      memory: the need of each executable, where the groups' backend says it.
      memory_limits: for each group, the bytes that each of its devices has.
      holdings: where the messages of an edge are until they are used; in the receiver's memory where it does
        not say.
    """

    number: int
    program: Program
    seconds: Mapping[str, float]
    xla_seconds: Mapping[int, float]
    memory: Mapping[str, ExecutableMemory]
    memory_limits: Mapping[int, int]
    holdings: Mapping[Edge, Holding]

    @property
    def plan(self) -> Plan:
        """The program's plan, with the memory that XLA needs for its executables."""
        plan = self.program.plan
        known = (dataclasses.replace(e, memory=self.memory.get(e.name)) for e in plan.executables)
        return dataclasses.replace(plan, executables=tuple(known))

    @staticmethod
    def of(
        number: int,
        program: Program,
        seconds: Mapping[str, float],
        replies: Mapping[int, LoadReply],
        holdings: Mapping[Edge, Holding],
    ) -> LoadedProgram:
        """The program that groups have loaded which gave these replies."""
        memory: dict[str, ExecutableMemory] = {}
        for reply in replies.values():
            for name, needed in reply.memory.items():
                memory[name] = memory.get(name, needed) | needed
        return LoadedProgram(
            number=number,
            program=program.without_functions(),
            seconds=seconds,
            xla_seconds={group: reply.xla_seconds for group, reply in replies.items()},
            memory=memory,
            memory_limits={group: reply.memory_limit for group, reply in replies.items()},
            holdings=holdings,
        )


class Runtime(Protocol):
    """The groups of one mesh. Requests to a group are carried out in the order they were made.

    Attributes:
      arguments: knows which arguments the groups keep for later calls.
      processes_per_group: the number of processes of each group.
      callbacks: make the calls that steps ask of the driver.
      meters: count the steps of each function.
      in_flight: how many more steps may be submitted; who calls ``submit_step`` enters it before.
      goes_back: whether groups go back to before a step that has failed, so that what it has taken over is
        there again.
      left_out: the groups that do not go back then.
      last_checkpoint: the path of the last checkpoint that ``mpmd.save`` has completed here, or from which
        groups have read; who saves and restores keeps it up to date.
      is_closed: whether ``close`` was called: nothing can be asked any more.
      captures: writes tasks that groups have kept.
    """

    arguments: ArgumentCache
    processes_per_group: tuple[int, ...]
    callbacks: CallbackThreads
    meters: StepMeters
    in_flight: StepsInFlight
    goes_back: bool
    left_out: frozenset[int]
    last_checkpoint: str | None
    is_closed: bool
    captures: Captures

    @property
    def attempt(self) -> int:
        """A number that changes when groups go back, or are about to, to run steps again."""
        ...

    def check_process(self) -> None:
        """Raises ``RuntimeError`` in a fork of the process that has made the runtime."""
        ...

    def load(self, program: Program) -> LoadedProgram:
        """Loads a program: each group with a part in it compiles its own.

        Waits for all; if one fails, none keeps it.
        """
        ...

    def unload(self, number: int) -> None:
        """Makes the groups drop a program, after the steps submitted before.

        Groups are told with their next request, or earlier. Callable at any point of any thread, even from
        garbage collection, and after ``close``.
        """
        ...

    def wait_to_submit(self, mpmd_idxs: Collection[int]) -> None:
        """Waits until ``submit_step`` would not block for a step of these groups, such as while groups are
        replaced.

        Within ``submit_step``, an interrupt has to wait, too.
        """
        ...

    def submit_step(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        """Starts one step: a request for each group that takes part. Returns at once.

        The other groups are told their releases, if there are any.

        A future raises ``TaskError`` when a task of that group failed, ``StepAborted`` when another
        group's did, ``GroupDiedError`` when the group's process is gone.
        """
        ...

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        """The value under a handle: the jax array in process, a numpy array from elsewhere.

        Returns at once, so several fetches may be under way.
        """
        ...

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        """Makes a group copy values to host memory, under the handle ``copy``, until ``write`` or ``free``.

        Returns at once. Steps submitted afterwards may take the values over. The future raises when a value
        was lost.
        """
        ...

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        """Makes each process of a group write its shards of copied values, while steps run.

        Args:
          copy: the handle of ``copy_out``; the copy is gone afterwards.
          specs: for each process of the group, where TensorStore is to write the values.

        Returns: at once a future of the number of bytes that each process has written.
        """
        ...

    def read(self, mpmd_idx: int, stored: Mapping[Handle, StoredArray]) -> Future[StepReply]:
        """Makes each process of a group read the shards that its devices are to hold. Returns at once."""
        ...

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        """Drops a value, or a copy of values: groups are told with their next request.

        Callable as ``unload`` is.
        """
        ...

    def next_handle(self) -> Handle:
        """A number never given before on this runtime; numbers ascend."""
        ...

    def next_step(self) -> int:
        """The number of the next step that is submitted; the first is 1."""
        ...

    def measured_peaks(self) -> tuple[int | None, ...]:
        """For each group, the most bytes that were ever allocated on one of its devices.

        ``None`` where the backend's allocator does not count them, or the group is gone. Does not wait for
        steps under way.
        """
        ...

    def analyses(self, number: int) -> dict[str, ExecutableAnalysis]:
        """XLA's analysis of each executable of a program, by its name."""
        ...

    def digests(self) -> tuple[ProcessDigests, ...]:
        """Digests of all values that live on the groups, after the steps submitted before: of each process.

        Raises: ``GroupDiedError`` as a step's future.
        """
        ...

    def start_trace(self) -> None:
        """Starts ``jax.profiler`` in every process, after the steps submitted before, and waits for that.

        Raises: ``RuntimeError`` when a process is traced already, ``GroupDiedError`` as a step's future.
        """
        ...

    def stop_trace(self) -> dict[str, TraceFiles]:
        """Ends the traces of ``start_trace``. Returns the files of each process, by its name.

        Raises: ``RuntimeError`` when a process was not traced, ``GroupDiedError`` as a step's future.
        """
        ...

    def close(self) -> None:
        """Ends the groups, which drop all programs and values."""
        ...


class RuntimeBase(Runtime):
    """The base of runtimes: it numbers values and programs, and remembers which are released."""

    goes_back = False
    left_out: frozenset[int] = frozenset()
    last_checkpoint: str | None = None
    is_closed = False

    def __init__(self, num_groups: int, max_in_flight: int = MAX_IN_FLIGHT):
        self._process = os.getpid()
        self.callbacks = CallbackThreads()
        self.meters = StepMeters()
        self.captures = Captures()
        self.in_flight = StepsInFlight(max_in_flight)
        self._handles = itertools.count()
        self._steps = itertools.count(1)
        self._runs = itertools.count(1)
        self._programs = itertools.count()
        self._participants: dict[int, tuple[int, ...]] = {}  # of each program
        self._released = ReleaseQueue(num_groups)
        # It gets no method of this object, which would then live until the garbage collector finds it.
        self.arguments = ArgumentCache(self._handles.__next__, self._released.add_handle, num_groups)

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} is a fork of process {self._process}, which has the mesh: from "
                "here no group can be reached. Run steps and read results there, and start processes that "
                "need a mesh of their own by multiprocessing's method 'spawn'"
            )

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._released.add_handle(mpmd_idxs, handle)

    @property
    def attempt(self) -> int:
        return 0

    def wait_to_submit(self, mpmd_idxs: Collection[int]) -> None:
        """Does not wait, where groups are not replaced."""

    def _releases_of_others(self, mpmd_idxs: Collection[int]) -> Iterator[tuple[int, Released]]:
        """Takes the releases of the groups that are not among ``mpmd_idxs``, and so get no step now."""
        for group in range(len(self.processes_per_group)):
            if group not in mpmd_idxs and (released := self._released.take(group)) != NOTHING_RELEASED:
                yield group, released

    def next_handle(self) -> Handle:
        return next(self._handles)

    def next_step(self) -> int:
        return next(self._steps)


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

    def add_program(self, mpmd_idxs: Iterable[int], number: int) -> None:
        for mpmd_idx in mpmd_idxs:
            self._programs[mpmd_idx].append(number)

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

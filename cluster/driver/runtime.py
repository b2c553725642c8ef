"""Drives the groups: ships programs, submits steps, fetches values."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import ray

from cluster.driver.arguments import HostArguments
from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.joined import failed, joined
from cluster.driver.exports import Exports
from cluster.driver.status import Status
from cluster.protocol.endpoint import Endpoint
from cluster.protocol.packing import PackedValue, join
from cluster.protocol.shipment import Shipment
from mpmd.errors import GroupDiedError
from mpmd.ir.participants import participants
from mpmd.ir.plan import Edge, Executable, Spec
from mpmd.ir.routes import Topology
from mpmd.memory import Holding
from mpmd.program import Function, Program, check_exportable
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.device_trace import TraceFiles, process_name
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.protocol import LoadedProgram, RuntimeBase
from mpmd.runtime.requests import Handle, LoadReply, StepReply, StepRequest
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.runtime.storage import JsonSpec, StoredArray
from mpmd.util.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True)
class LoadRequests:
    """The requests to the processes of each group by which they loaded a program.

    Attributes:
      groups: the groups that take part in the program, whose processes have loaded it.
      shipment: the argument of ``ship``, before ``load``.
      compiled: for each group, the arguments of its ``compile`` calls before ``load``, in order.
    """

    groups: tuple[int, ...]
    shipment: ray.ObjectRef
    compiled: Mapping[int, Sequence[tuple[Executable, bytes]]]


class RayRuntime(RuntimeBase):
    """Implements ``mpmd.runtime.protocol.Runtime`` with an actor for each process of a group.

    A step is one request to each process, whatever the program. Nothing can be asked before ``attach``.
    ``close`` ends the actors; so does dropping the last reference to the runtime, and the exit of the
    interpreter.

    Args:
      processes: which process of which group each actor is.
      submeshes: the shape of each group's submesh.
      topology: the processes of the groups.
      platform: the groups' devices, as ``jax.export`` names them.
      holdings: where the messages of each edge are until they are used.
      max_in_flight: how many steps may be under way.
    """

    def __init__(
        self,
        processes: Sequence[Endpoint],
        submeshes: Sequence[jax.sharding.AbstractMesh],
        topology: Topology,
        platform: str,
        holdings: Mapping[Edge, Holding],
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        super().__init__(len(submeshes), max_in_flight)
        self._calling = threading.Lock()  # so that all processes of a group get its calls in the same order
        self._numbers = collections.defaultdict(list)  # of each group's processes
        for process in processes:
            self._numbers[process.mpmd_idx].append(process.number)
        self.processes_per_group = tuple(len(self._numbers[i]) for i in range(len(submeshes)))
        self._submeshes = tuple(submeshes)
        self._topology = topology
        self._arguments: dict[int, HostArguments] = {}  # by program
        self._platform = platform
        self._holdings = dict(holdings)

    def attach(self, calls: ActorCalls) -> None:
        """From now on, makes calls on these actors, one for each process; earlier ones were detached."""
        self._calls = calls
        self._finalizer = weakref.finalize(self, calls.close_soon)
        self._finalizer.atexit = False  # at exit, the groups close themselves

    def detach(self, reason: BaseException) -> None:
        """Fails all calls with ``reason``, now and until ``attach``; the actors live on."""
        self._finalizer.detach()
        self._calls.detach(reason)

    def death_of(self, mpmd_idx: int) -> GroupDiedError | None:
        """The reason why a group is dead; ``None`` when it is not."""
        return self._calls.death_of(mpmd_idx)

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """The actors of all processes, group by group."""
        return self._calls.actors

    def load(self, program: Program) -> LoadedProgram:
        """Ships a program once, and has all groups compile their part at the same time.

        Raises: ``TaskError`` with the label ``load`` when a group cannot, ``GroupDiedError`` when one died,
          ``ValueError`` for callbacks that cannot travel.
        """
        return self.load_with_requests(program)[0]

    def load_with_requests(self, program: Program) -> tuple[LoadedProgram, LoadRequests]:
        """As ``load``. Returns also what to ask other processes that are to load the program."""
        self.check_process()
        check_exportable(program)
        number = next(self._programs)
        self._participants[number] = participants(program.plan)
        watch = Stopwatch()
        exports = Exports(self._submeshes, self._platform, watch)
        requested = collections.defaultdict(list)

        def compile(mpmd_idx: int, executable: Executable, function: Function) -> Future[tuple[Spec, ...]]:
            exported = exports.of(mpmd_idx, executable, function)
            requested[mpmd_idx].append((executable, exported))
            # By all processes: their compilers may have to talk to one another.
            compiling = self.call_group(mpmd_idx, "compile", number, executable, exported)
            return joined(compiling, lambda specs: specs[0])

        try:
            with watch("resolve"):
                program = resolve_specs(program, compile)
            exported = exports.of_plan(program)
            with watch("load"):
                shipment = Shipment(program.plan, exported, program.constants, program.compiled)
                stored = ray.put(shipment)
                replies = self._load(number, stored)
        except BaseException:  # also an interrupt: some groups may have the shipment, or have loaded it
            self.unload(number)
            self._tell_released()
            raise
        self._arguments[number] = HostArguments(program.plan, self._topology)
        loaded = LoadedProgram.of(number, program, watch.seconds, replies, self._holdings)
        return loaded, LoadRequests(self._participants[number], stored, requested)

    def _load(self, number: int, stored: ray.ObjectRef) -> dict[int, LoadReply]:
        self._tell_released()
        groups = self._participants[number]
        processes = [process for i in groups for process in self._numbers[i]]
        for shipped in [self._calls.call_ray(process, "ship", number, stored) for process in processes]:
            shipped.result()
        loading = {i: joined(self.call_group(i, "load", number), _of_all) for i in groups}
        concurrent.futures.wait(loading.values())
        return {i: reply.result() for i, reply in loading.items()}

    def call_group(self, mpmd_idx: int, method: str, *arguments: Any) -> list[Future]:
        """Calls all processes of a group. They get all calls in the same order, as collectives need it.

        Raises: as ``ActorCalls.call``.
        """
        with self._calling:
            return [self._calls.call(number, method, *arguments) for number in self._numbers[mpmd_idx]]

    def unload(self, number: int) -> None:
        self._arguments.pop(number, None)
        self._released.add_program(self._participants.pop(number, ()), number)

    def _tell_released(self, but: Collection[int] = ()) -> None:
        """Tells groups, except ``but``, which values and programs to drop now, before their next step."""
        for mpmd_idx, released in self._releases_of_others(but):
            with contextlib.suppress(RuntimeError):  # the group has died, or the mesh was closed
                self.call_group(mpmd_idx, "release", released)

    def submit_step(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        self.check_process()
        (step,) = {request.step for request in requests.values()}
        groups = frozenset(requests)
        self._tell_released(but=groups)
        with self._calling:
            run = next(self._runs)
            try:
                calls: dict[int, tuple] = {}
                for mpmd_idx, request in requests.items():
                    calls |= self._packed(mpmd_idx, dataclasses.replace(request, groups=groups, run=run))
                replies = self._calls.call_step(run, calls, step)
                return {i: _first([replies[number] for number in self._numbers[i]]) for i in requests}
            except RuntimeError as error:  # a group has died, or the mesh was closed
                return {mpmd_idx: failed(error) for mpmd_idx in requests}

    def _packed(
        self, mpmd_idx: int, request: StepRequest
    ) -> dict[int, tuple[StepRequest, dict[Handle, PackedValue]]]:
        """The arguments of ``run_step`` for each process of a group."""
        arguments = self._arguments[request.program]
        packed = [arguments.packed(mpmd_idx, rank, request) for rank in range(len(self._numbers[mpmd_idx]))]
        released = request.released.and_also(self._released.take(mpmd_idx))
        request = dataclasses.replace(request, host_arrays={}, released=released)
        return {n: (request, arrays) for n, arrays in zip(self._numbers[mpmd_idx], packed, strict=True)}

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        self.check_process()
        return _joined(
            lambda: self.call_group(mpmd_idx, "fetch", handle), _copied if self._calls.by_ray else join
        )

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        self.check_process()
        return _joined(lambda: self.call_group(mpmd_idx, "copy_out", copy, handles), lambda _: None)

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        self.check_process()
        processes = list(zip(self._numbers[mpmd_idx], specs, strict=True))
        return _joined(lambda: [self._calls.call_ray(n, "write", copy, mine) for n, mine in processes], list)

    def read(self, mpmd_idx: int, stored: Mapping[Handle, StoredArray]) -> Future[StepReply]:
        self.check_process()
        return _joined(lambda: self.call_group(mpmd_idx, "read", stored), lambda replies: replies[0])

    def measured_peaks(self) -> tuple[int | None, ...]:
        self.check_process()
        return tuple(map(self._measured_peak, range(len(self._submeshes))))

    def _measured_peak(self, mpmd_idx: int) -> int | None:
        try:
            asked = [self._calls.call_ray(number, "measured_peak") for number in self._numbers[mpmd_idx]]
            peaks = [future.result() for future in asked]
        except RuntimeError:  # the group has died, or the mesh was closed
            return None
        return None if None in peaks else max(peaks)

    def analyses(self, number: int) -> dict[str, ExecutableAnalysis]:
        self.check_process()
        first = [self._numbers[i][0] for i in self._participants[number]]
        asked = [self._calls.call_ray(process, "analyses", number) for process in first]
        return {name: each for future in asked for name, each in future.result().items()}

    def digests(self, mpmd_idxs: Collection[int] | None = None) -> tuple[ProcessDigests, ...]:
        """As in the protocol, for the groups ``mpmd_idxs``; ``None`` for all groups."""
        self.check_process()
        groups = range(len(self._submeshes)) if mpmd_idxs is None else sorted(mpmd_idxs)
        taken = [digests for group in groups for digests in self.call_group(group, "digests")]
        return tuple(digests.result() for digests in taken)

    def start_trace(self) -> None:
        self.check_process()
        started = self._call_all("start_trace")
        if errors := [error for future in started if (error := future.exception()) is not None]:
            self._call_all("stop_trace")
            raise errors[0]

    def stop_trace(self) -> dict[str, TraceFiles]:
        return {
            process_name(mpmd_idx, rank): files
            for mpmd_idx, of_group in enumerate(self._call_all("stop_trace"))
            for rank, files in enumerate(of_group.result())
        }

    def _call_all(self, method: str) -> list[Future[list]]:
        """Calls all processes, and waits for them. Returns a future of the results of each group."""
        groups = range(len(self._submeshes))
        called = [_joined(functools.partial(self.call_group, group, method), list) for group in groups]
        concurrent.futures.wait(called)
        return called

    def status(self) -> Status:
        """The activity of every process; does not wait for steps under way."""
        self.check_process()
        return self._calls.status()

    def ask_health(self) -> None:
        """Asks all processes for an answer, so that they are pinged, and who stays silent counts as dead."""
        for process in self._calls.processes:
            with contextlib.suppress(RuntimeError):  # it is known to be dead, or the mesh was closed
                self._calls.call_ray(process.number, "health")

    def close(self) -> None:
        """Kills the actors; all calls that are under way fail. May be called again."""
        self.is_closed = True
        self._calls.close()


def _first(replies: Sequence[Future[StepReply]]) -> Future[StepReply]:
    """The reply of a group's first process, with the times and the most memory of all, when all are there."""
    return replies[0] if len(replies) == 1 else joined(replies, _of_processes)


def _of_processes(replies: Sequence[StepReply]) -> StepReply:
    times = tuple(times for reply in replies for times in reply.times)
    measured = [reply.memory for reply in replies if reply.memory is not None]
    memory = functools.reduce(operator.or_, measured) if measured else None
    events = tuple(events for reply in replies for events in reply.events)
    return dataclasses.replace(replies[0], times=times, memory=memory, events=events)


def _of_all(replies: Sequence[LoadReply]) -> LoadReply:
    return functools.reduce(operator.or_, replies)


def _joined(call: Callable[[], list[Future]], combine: Callable[[list[Any]], Any]) -> Future:
    """One future of calls on the processes of a group; it fails where they cannot be made."""
    try:
        return joined(call(), combine)
    except RuntimeError as error:  # the group has died, or the mesh was closed
        return failed(error)


def _copied(values: list[PackedValue]) -> np.ndarray:
    """A copy, because a view of Ray's memory would not outlive Ray; read-only, like the arrays of JAX."""
    array = np.array(join(values))
    array.flags.writeable = False
    return array

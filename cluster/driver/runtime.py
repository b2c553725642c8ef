"""Drives the groups: ships programs, submits steps, fetches values."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray

from cluster.driver.arguments import HostArguments
from cluster.driver.calls.actor_calls import ActorCalls
from cluster.driver.calls.joined import failed, joined
from cluster.driver.exports import Exports
from cluster.driver.status import ProcessesStatus
from cluster.protocol.endpoint import Endpoint
from cluster.protocol.packing import join
from cluster.protocol.shipment import Compile, Load, Shipment
from mpmd.errors import GroupDiedError
from mpmd.ir.participants import participants
from mpmd.ir.plan import Edge, Executable, Spec
from mpmd.memory import Holding
from mpmd.program import Function, Program, check_exportable
from mpmd.runtime.compiling import LoadReply
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.protocol import LoadedProgram, Runtime
from mpmd.runtime.requests import Fetch, Release, Released, Request, StepReply, StepRequest
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.util.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True)
class LoadRequests:
    """The requests to each group by which it has loaded a program.

    Attributes:
      shipment: the argument of ``ship``, which comes before the last request.
      by_group: for each group that takes part in the program, ``Compile`` of executables, and ``Load``.
    """

    shipment: ray.ObjectRef
    by_group: Mapping[int, Sequence[Request]]


class RayRuntime(Runtime):
    """Implements ``Runtime`` with an actor for each process of a group.

    A step is one request to each process, whatever the program. Nothing can be asked before ``attach``.
    ``close`` ends the actors; so does dropping the last reference to the runtime, and the exit of the
    interpreter.

    Args:
      processes: which process of which group each actor is.
      platform: the groups' devices, as ``jax.export`` names them.
      holdings: where the messages of each edge are until they are used.
      max_in_flight: how many steps may be under way.
    """

    def __init__(
        self,
        processes: Sequence[Endpoint],
        platform: str,
        holdings: Mapping[Edge, Holding],
        max_in_flight: int = MAX_IN_FLIGHT,
    ):
        self._shapes = processes[0].groups
        super().__init__([shape.num_processes for shape in self._shapes], max_in_flight)
        # Of the processes of each group.
        self._numbers = [
            [process.number for process in processes if process.mpmd_idx == group]
            for group in range(len(self._shapes))
        ]
        self._asking = threading.Lock()  # so that all processes of a group get its requests in the same order
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
        return self._calls.death_of(mpmd_idx)

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        return self._calls.actors

    def load(self, program: Program) -> LoadedProgram:
        """Ships a program once, and has all groups compile their part at the same time.

        Raises: ``TaskError`` with the label ``load`` when a group cannot, ``GroupDiedError`` when one died,
          ``ValueError`` for callbacks that cannot travel.
        """
        return self.load_with_requests(program)[0]

    def load_with_requests(self, program: Program) -> tuple[LoadedProgram, LoadRequests]:
        self.check_process()
        check_exportable(program)
        number = next(self._programs)
        self._participants[number] = participants(program.plan)
        watch = Stopwatch()
        exports = Exports(self._shapes, self._platform, watch)
        requested: dict[int, list[Request]] = collections.defaultdict(list)

        def compile(mpmd_idx: int, executable: Executable, function: Function) -> Future[tuple[Spec, ...]]:
            request = Compile(number, executable, exports.of(mpmd_idx, executable, function))
            requested[mpmd_idx].append(request)
            # By all processes: their compilers may have to talk to one another.
            return self.ask({mpmd_idx: request})[mpmd_idx]

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
        self._arguments[number] = HostArguments(program.plan, self._shapes)
        program = program.without_functions()
        loaded = LoadedProgram(number, program, watch.seconds, replies, self._holdings)
        by_group = {i: [*requested[i], Load(number)] for i in self._participants[number]}
        return loaded, LoadRequests(stored, by_group)

    def _load(self, number: int, stored: ray.ObjectRef) -> dict[int, LoadReply]:
        self._tell_released()
        groups = self._participants[number]
        processes = [process for i in groups for process in self._numbers[i]]
        shipped: list[Future] = []
        try:
            for process in processes:
                shipped.append(self._calls.call_ray(process, "ship", number, stored))
            for each in shipped:
                each.result()
        finally:  # a group drops a shipment that has arrived, but not one that is on its way
            concurrent.futures.wait(shipped)
        loading = self.ask({i: Load(number) for i in groups})
        concurrent.futures.wait(loading.values())
        return {i: reply.result() for i, reply in loading.items()}

    def unload(self, number: int) -> None:
        self._arguments.pop(number, None)
        for mpmd_idx in self._participants.pop(number, ()):
            self._released.add(mpmd_idx, Released(programs=(number,)))

    def release(self, mpmd_idx: int, released: Released) -> None:
        """Has a group drop values and programs with its next step."""
        self._released.add(mpmd_idx, released)

    def _ask_group(self, mpmd_idx: int, request: Request) -> Future:
        """Asks all processes of a group. They get all requests in the same order, as collectives need it."""
        try:
            with self._asking:
                answers = [self._calls.ask(number, request) for number in self._numbers[mpmd_idx]]
        except RuntimeError as error:  # the group has died, or the mesh was closed
            return failed(error)
        if isinstance(request, Fetch):
            return joined(answers, _copied if self._calls.by_ray else join)
        return joined(answers, request.join)

    def _submit_step(self, requests: Mapping[int, StepRequest]) -> dict[int, Future[StepReply]]:
        groups = frozenset(requests)
        self._tell_released(but=groups)
        with self._asking:
            run = next(self._runs)
            sent: dict[int, StepRequest] = {}
            for mpmd_idx, request in requests.items():
                arguments, released = self._arguments[request.program], self._released.take(mpmd_idx)
                for rank, number in enumerate(self._numbers[mpmd_idx]):
                    packed = arguments.packed(mpmd_idx, rank, request)
                    sent[number] = dataclasses.replace(
                        request, host_arrays=packed, released=released, groups=groups, run=run
                    )
            try:
                replies = self._calls.ask_step(sent)
            except RuntimeError as error:  # a group has died, or the mesh was closed
                for number, unsent in sent.items():  # the queue no longer has what living groups are to drop
                    if any(unsent.released):
                        with contextlib.suppress(RuntimeError):
                            self._calls.ask(number, Release(unsent.released))
                return {mpmd_idx: failed(error) for mpmd_idx in requests}
        return {
            mpmd_idx: _joined([replies[number] for number in self._numbers[mpmd_idx]], request)
            for mpmd_idx, request in requests.items()
        }

    def status(self) -> ProcessesStatus:
        self.check_process()
        return self._calls.status()

    def ask_health(self) -> None:
        """Asks all processes for an answer, so that they are pinged, and who stays silent counts as dead."""
        for process in self._calls.processes:
            with contextlib.suppress(RuntimeError):  # it is known to be dead, or the mesh was closed
                self._calls.call_ray(process.number, "health")

    def close(self) -> None:
        self.is_closed = True
        self._calls.close()


def _joined(replies: Sequence[Future[StepReply]], request: StepRequest) -> Future[StepReply]:
    return replies[0] if len(replies) == 1 else joined(replies, request.join)


def _copied(values: Sequence[Any]) -> Any:
    """A copy, because a view of Ray's memory would not outlive Ray; read-only, like the arrays of JAX."""
    if isinstance(values[0], list):
        return tuple(map(_copied, zip(*values, strict=True)))
    array = np.array(join(values))
    array.flags.writeable = False
    return array

"""The actors of one mesh, one for each process: calls as futures, and one thread that handles their failures.

To read top-down: ``ask``, ``ask_step`` and ``call_ray`` make calls; ``_on_reply`` settles their futures;
``_run`` is the thread, which handles one event after the other: errors, deaths, replies that come by Ray.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle, ActorMethod
from ray.util.placement_group import PlacementGroup

from cluster.driver.calls.liveness import Liveness, TimeLimits
from cluster.driver.calls.pending_calls import PendingCall, PendingCalls, PendingStep
from cluster.driver.calls.post_mortem import death_report, location_of, translate
from cluster.driver.ray_session import RaySession
from cluster.driver.status import ProcessesStatus, ProcessStatus
from cluster.process.world import WorldLostError
from cluster.protocol.endpoint import Endpoint
from cluster.protocol.process_info import ProcessInfo
from cluster.tcp.connection import Connection
from cluster.tcp.frames import Frame, encode
from cluster.tcp.rpc import Client
from cluster.transports.inbox import PeerLostError
from mpmd.errors import MESH_CLOSED, GroupDiedError, StepAborted
from mpmd.runtime.activity import Doing
from mpmd.runtime.interrupts import DeferredInterrupt
from mpmd.runtime.requests import Request, StepRequest

_POLL_SECONDS = 1.0
"""The seconds between two checks, without events, that Ray is connected and the groups are alive."""

STATUS_SECONDS = 2.0

_WITHOUT_RAY = "Ray was shut down, and with it the cluster mesh"


class ActorCalls:
    """Calls the actors and watches them. When a step fails on one group, all groups are told to abort it.

    Args:
      actors: the connected actors, one for each of the processes.
      processes: the group and rank of each actor's process.
      placement_groups: the actors' resources; removed when the actors end. May change until then.
      connections: the driver's connection with each actor; empty to make all calls by Ray.
      infos: where the processes run.
      limits: how long steps and tasks may take.
      on_death: is called in the thread when a group counts as dead, once or more, after its calls failed.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        processes: Sequence[Endpoint],
        placement_groups: Collection[PlacementGroup],
        connections: Sequence[Connection],
        infos: Sequence[ProcessInfo],
        limits: TimeLimits,
        on_death: Callable[[GroupDiedError], object] = lambda error: None,
    ):
        self.actors = tuple(actors)
        self.processes = tuple(processes)
        self._placement_groups = placement_groups
        self._on_death = on_death
        self._is_detached = False
        self._process = os.getpid()
        self._session = RaySession()
        self._pending = PendingCalls()
        self._infos = tuple(infos)
        self._node_id = ray.get_runtime_context().get_node_id()
        locations = [location_of(info) for info in infos]
        self._liveness = Liveness(self.processes, limits, self._pending, locations)
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._clients = [
            Client(tcp, self._on_reply, functools.partial(self._on_disconnect, number))
            for number, tcp in enumerate(connections)
        ]
        self._thread = threading.Thread(target=self._run, name="mpmd groups", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        for number in range(len(self.actors)):
            self._watch(number)

    def _watch(self, number: int) -> None:
        """Makes the call that ends, or fails, when the process does."""
        ending = self.call_ray(number, "serve", endless=True)
        if not self.by_ray:
            ending.add_done_callback(lambda end: self._on_disconnect(number, end.exception()))

    @property
    def by_ray(self) -> bool:
        return not self._clients

    def death_of(self, mpmd_idx: int) -> GroupDiedError | None:
        return self._pending.death_of(mpmd_idx)

    def ask(self, number: int, request: Request) -> Future:
        """Asks the process with a number. Returns at once.

        Raises: ``GroupDiedError`` when the group is known to be dead, ``RuntimeError`` after ``close``.
        """
        (pending,) = self._pending.add([self.processes[number]])
        try:
            self._prepare(pending, request)()
        except Exception as error:  # the request does not pickle
            self._fail(pending, error.with_traceback(None))
        return pending.future

    def call_ray(self, number: int, method: str, *arguments: Any, endless: bool = False) -> Future:
        """Calls a method of the actor by Ray, in no order relative to requests. Raises as ``ask``.

        ``endless``: the call ends with the process, so nobody waits for its reply.
        """
        (pending,) = self._pending.add([self.processes[number]], endless=endless)
        self._send_by_ray(pending, getattr(self.actors[number], method), arguments)
        return pending.future

    def ask_step(self, requests: Mapping[int, StepRequest]) -> dict[int, Future]:
        """Asks the processes with these numbers for one run of a step. When one fails, all abort the step.

        Raises: as ``ask``, when one of the groups is dead; then no group is asked.
        """
        first = next(iter(requests.values()))
        calls = self._pending.add([self.processes[number] for number in requests], first.run, first.step)
        unsent: collections.deque[Callable[[], None]] = collections.deque()
        try:
            unsent.extend(self._prepare_step(calls, requests))
            while unsent:
                unsent[0]()
                unsent.popleft()
        except BaseException:  # also an interrupt: those that were asked must not wait for the others
            # The processes of a group come to a step together, or hang. One may get it twice, and refuses.
            for send in unsent:
                send()
            for pending in calls:
                self._fail(pending, RuntimeError("the step was not sent to all groups"))
            raise
        return {pending.process.number: pending.future for pending in calls}

    def _prepare_step(
        self, calls: Sequence[PendingCall], requests: Mapping[int, StepRequest]
    ) -> list[Callable[[], None]]:
        prepared = []
        for pending in calls:
            try:
                prepared.append(self._prepare(pending, requests[pending.process.number]))
            except Exception as error:
                self._fail(pending, error.with_traceback(None))
                for other in calls:
                    self._fail(other, StepAborted(str(error)))
                return []
        return prepared

    def _prepare(self, pending: PendingCall, request: Request) -> Callable[[], None]:
        """Encodes a request. Returns the function that sends it, which takes no time."""
        number, beside = pending.process.number, request.beside_steps
        if beside is None and not self.by_ray:
            return functools.partial(self._send, number, encode(pending.number, request))
        answer: ActorMethod = self.actors[number].answer
        if beside is not None:
            answer = answer.options(concurrency_group=beside)
        return functools.partial(self._send_by_ray, pending, answer, (request,))

    def _send(self, number: int, request: Frame) -> None:
        with DeferredInterrupt():  # half a request would end the connection, and with it the group
            self._clients[number].send(request)

    def _send_by_ray(self, pending: PendingCall, method: ActorMethod, arguments: tuple) -> None:
        if not self._session.is_connected:  # the call would start Ray anew
            self._pending.close(RuntimeError(_WITHOUT_RAY))
            return
        try:
            reference = method.remote(*arguments)
        except Exception as error:  # the arguments do not pickle
            self._fail(pending, error.with_traceback(None))
            return
        # Ray runs the callback in a thread of its own, which must not call Ray or take long.
        reference.future().add_done_callback(
            lambda reply: self._events.put(functools.partial(self._settle, pending, reply.result))
        )

    def _on_reply(self, reply: Frame) -> None:
        """Called in the thread of a connection."""
        pending = self._pending.find(reply.number)
        if pending is None:  # its group or its step has failed before the reply came
            return
        try:
            result = _result(reply)
        except Exception as error:
            translated = translate(error, pending.process)
            self._events.put(functools.partial(self._settle_by_error, pending, translated))
        else:  # at once: to wake the other thread for it would cost more than the rest
            self._pending.succeed(pending, result)

    def _on_disconnect(self, number: int, error: BaseException | None) -> None:
        """Called in any thread, at least once for each connection that ends."""
        has_cause = error is not None and not isinstance(error, EOFError | ConnectionError)
        cause = f": {type(error).__name__}: {error}" if has_cause else ""
        mark_disconnected = self._liveness.mark_disconnected
        self._events.put(functools.partial(mark_disconnected, number, cause, time.monotonic()))

    def _run(self) -> None:
        """The thread: handles events until ``close``, the end of Ray, or a fault of its own."""
        reason = _WITHOUT_RAY
        try:
            while self._session.is_connected:
                try:
                    event = self._events.get(timeout=_POLL_SECONDS)
                    if event is None:
                        reason = MESH_CLOSED
                        break
                    event()
                    del event  # an idle thread must not keep the last result
                except queue.Empty:
                    pass
                self._fail_dead_and_late()
        except Exception as error:
            # When Ray is shut down under the mesh, any call of Ray may raise: the futures say why.
            if self._session.is_connected:
                reason = f"the cluster mesh has failed: {type(error).__name__}: {error}"
                raise
        finally:
            self._pending.close(RuntimeError(reason))
            self._release()

    def _settle(self, pending: PendingCall, result: Callable[[], Any]) -> None:
        try:
            value = result()
        except Exception as error:
            self._settle_by_error(pending, translate(error, pending.process))
        else:
            self._pending.succeed(pending, value)

    def _settle_by_error(self, pending: PendingCall, error: BaseException) -> None:
        """Fails the call, and perhaps its group; leaves it pending where a death will be reported soon."""
        process = pending.process
        match error:
            case WorldLostError():  # either a process has died, or the whole group is declared dead
                self._liveness.mark_broken(process.number, str(error), time.monotonic())
            case PeerLostError():
                self._mark_unreachable(self.processes[error.process], pending, error)
            case GroupDiedError():
                # Else the process ended because the first one did, whose report is still to come.
                if self._liveness.disconnected_first(process.number):
                    report = death_report(self._infos[process.number], self._node_id)
                    died = GroupDiedError(f"{error} {report}", error.mpmd_idx)
                    died.__cause__ = error.__cause__
                    self._mark_dead(died)
            case _:
                self._fail(pending, error)

    def _mark_unreachable(self, peer: Endpoint, pending: PendingCall, error: PeerLostError) -> None:
        """Handles a process's loss of a peer. Both may live without a network between: one has to end.

        The peer ends, unless the process names itself in ``error``, because it cannot read the peer's
        messages.
        """
        if self._pending.death_of(pending.process.mpmd_idx) is not None:
            return  # it is gone itself, and the peer has to stay
        is_peer = peer != pending.process
        message = f"{peer.name} is gone for {pending.process.name}: {error}" if is_peer else str(error)
        self._mark_dead(GroupDiedError(message, peer.mpmd_idx))
        self._fail(pending, StepAborted(message))  # if the peer has no part in this step

    def _fail(self, pending: PendingCall, error: BaseException) -> None:
        self._broadcast_aborts(self._pending.fail(pending, error))

    def _mark_dead(self, error: GroupDiedError) -> None:
        aborts = self._pending.mark_dead(error.mpmd_idx, error)
        # An actor that was only out of reach has missed calls, so it must not run any longer; nor must the
        # others of its group, which would wait for it.
        for process in self.processes:
            if process.mpmd_idx == error.mpmd_idx:
                self._session.kill(self.actors[process.number])
                if not self.by_ray:
                    self._clients[process.number].end()
        self._broadcast_aborts(aborts)
        self._on_death(error)

    def _fail_dead_and_late(self) -> None:
        now = time.monotonic()
        for late in self._liveness.late_steps(now):
            self._broadcast_aborts(self._pending.time_out(*late))
        for death in self._liveness.deaths(now):
            self._mark_dead(death)
        for number in self._liveness.pings(now):
            if not self._session.is_connected:  # the call would start Ray anew
                break
            answer: Future[Doing] = self.actors[number].health.remote().future()
            answer.add_done_callback(functools.partial(self._on_answer, number))

    def _on_answer(self, number: int, answer: Future[Doing]) -> None:
        """Called in a thread of Ray's; an actor answers at once, whatever it computes."""
        doing = answer.result() if answer.exception() is None else None
        self._liveness.mark_answered(number, doing, time.monotonic())

    def _broadcast_aborts(self, failed: Sequence[PendingStep]) -> None:
        if self._session.is_connected:
            for step in failed:
                for process in self.processes:
                    if process.mpmd_idx in step.mpmd_idxs:
                        self.actors[process.number].abort.remote(step.run, str(step.failure))

    def status(self) -> ProcessesStatus:
        """The activity of every process. Waits ``STATUS_SECONDS`` at most for the answers."""
        living = [p.number for p in self.processes if self._pending.death_of(p.mpmd_idx) is None]
        answers: dict[int, ray.ObjectRef] = {}
        if living and self._session.is_connected and self._thread.is_alive():
            answers = {number: self.actors[number].health.remote() for number in living}
            ready, _ = ray.wait([*answers.values()], num_returns=len(answers), timeout=STATUS_SECONDS)
            answers = {number: answer for number, answer in answers.items() if answer in ready}
        states = (self._status_of(number, answers.get(number)) for number in range(len(self.actors)))
        return ProcessesStatus(tuple(states))

    def _status_of(self, number: int, answer: ray.ObjectRef | None) -> ProcessStatus:
        process = self.processes[number]
        death = self._pending.death_of(process.mpmd_idx)
        if death is not None:
            state = f"dead: {death}"
        elif not self._thread.is_alive():
            state = "closed"
        else:
            state = f"does not answer; {self._liveness.doing(number, time.monotonic())}"
            if answer is not None:
                with contextlib.suppress(ray.exceptions.RayError):  # it has just died
                    state = str(ray.get(answer))
        return ProcessStatus(self._infos[number], state, self._pending.count_of(process))

    def close(self) -> None:
        """Fails all calls, kills the actors and gives their resources back. May be called again."""
        self.close_soon()
        settling = (self._thread, *(client.thread for client in self._clients))
        if threading.current_thread() not in settling:  # a future's callback may close the mesh
            self._thread.join()

    def detach(self, reason: BaseException) -> None:
        """As ``close``, but the actors live on, for a later ``ActorCalls``. Calls fail with ``reason``."""
        self._is_detached = True
        self._pending.close(reason)
        self.close()

    def close_soon(self) -> None:
        """``close`` without waiting for it; may be called by the garbage collector, at any point."""
        if os.getpid() != self._process:  # a fork of the driver shares the connections, and must not end them
            return
        for client in self._clients:
            client.end()
        self._events.put(None)

    def _release(self) -> None:
        for client in self._clients:
            client.close()
        atexit.unregister(self.close)
        if self._is_detached:
            return
        for actor in self.actors:
            self._session.kill(actor)
        self._session.remove(self._placement_groups)


def _result(reply: Frame) -> Any:
    result = reply.decode()
    if isinstance(result, ray.exceptions.RayTaskError):
        raise result
    return result

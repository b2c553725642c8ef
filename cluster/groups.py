"""The actors of one mesh: calls on them as futures, and one thread that notices how the calls end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.errors import translate
from cluster.outstanding import Abort, Outstanding, Ticket
from cluster.rpc import Client, Connection, Frame, frame
from mpmd.errors import GroupDiedError

_POLL_SECONDS = 1.0
"""How often the thread, when nothing happens, looks whether Ray is still there."""

_PING_SECONDS = 10.0
_STUCK_SECONDS = 60.0
"""A process that has not answered for so long, while a step waits, will not: it is stopped, or hangs."""

_PATIENCE_SECONDS = 5.0
"""For so long a group whose connection has ended is given to Ray, which knows why it died."""

_WITHOUT_RAY = "Ray was shut down, and with it the cluster mesh"


class Groups:
    """Calls the actors, and watches them: when a step fails anywhere, all groups are told to abort it.

    Args:
      actors: the connected actors, by ``mpmd_idx``.
      placement_group: where they are; it goes when they go.
      connections: the connection with each of them; empty where all calls are to be Ray's.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        placement_group: PlacementGroup,
        connections: Sequence[socket.socket],
    ):
        self.actors = tuple(actors)
        self._placement_group = placement_group
        self._process = os.getpid()
        self._session = _session()
        self._outstanding = Outstanding()
        self._pinged: dict[int, float] = {}
        self._next_ping = 0.0
        self._cut_off: dict[int, tuple[float, str]] = {}  # since when a group's connection has ended, and why
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._clients = [
            Client(Connection(tcp), self._replied, functools.partial(self._ended, mpmd_idx))
            for mpmd_idx, tcp in enumerate(connections)
        ]
        self._thread = threading.Thread(target=self._serve, name="mpmd groups", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        for mpmd_idx in range(len(self.actors)):
            self._watch(mpmd_idx)

    def _watch(self, mpmd_idx: int) -> None:
        """Has Ray report when the group's process dies."""
        if self.by_ray:
            self.call_ray(mpmd_idx, "watch")
        else:
            served = self.call_ray(mpmd_idx, "serve")
            served.add_done_callback(lambda end: self._ended(mpmd_idx, end.exception()))

    @property
    def by_ray(self) -> bool:
        """Whether all calls are Ray's."""
        return not self._clients

    def call(
        self, mpmd_idx: int, method: str, *arguments: Any, decode: Callable[[Any], Any] = lambda reply: reply
    ) -> Future:
        """Calls a method of a group's actor, after the calls before. Returns at once; ``decode`` is applied
        to what comes back.

        Raises: ``GroupDiedError`` when the group is known to be dead, ``RuntimeError`` after ``close``.
        """
        (ticket,) = self._outstanding.add([mpmd_idx], decode=decode)
        self._call(ticket, method, arguments)
        return ticket.future

    def call_ray(self, mpmd_idx: int, method: str, *arguments: Any) -> Future:
        """Calls a method by Ray in any case, and in no order with the other calls. Raises as ``call``."""
        (ticket,) = self._outstanding.add([mpmd_idx])
        self._call_by_ray(ticket, method, arguments)
        return ticket.future

    def step(self, step: int, arguments: Mapping[int, tuple]) -> dict[int, Future]:
        """Calls ``step`` on each of the groups, as one step: where one fails, the others are unblocked.

        Raises: as ``call``, when one of the groups is dead; then none is called.
        """
        tickets = self._outstanding.add(arguments, step)
        try:
            for ticket in tickets:
                self._call(ticket, "step", arguments[ticket.mpmd_idx])
        except KeyboardInterrupt:  # those that were called must not wait for the others
            for ticket in tickets:
                error = RuntimeError("an interrupt kept the step from being sent to all groups")
                self._tell(self._outstanding.fail(ticket, error))
            raise
        return {ticket.mpmd_idx: ticket.future for ticket in tickets}

    def _call(self, ticket: Ticket, method: str, arguments: tuple) -> None:
        if self.by_ray:
            self._call_by_ray(ticket, method, arguments)
            return
        try:
            request = frame(ticket.number, (method, arguments))
        except Exception as error:  # arguments that cannot be sent; the step's other groups must know
            self._tell(self._outstanding.fail(ticket, error.with_traceback(None)))
            return
        self._clients[ticket.mpmd_idx].ask(request)

    def _call_by_ray(self, ticket: Ticket, method: str, arguments: tuple) -> None:
        if not self._connected():  # Ray would start itself, to be called
            self._outstanding.close(RuntimeError(_WITHOUT_RAY))
            return
        try:
            reference = getattr(self.actors[ticket.mpmd_idx], method).remote(*arguments)
        except Exception as error:  # arguments that cannot be sent, as in ``_call``
            self._tell(self._outstanding.fail(ticket, error.with_traceback(None)))
            return
        # Ray runs the callback in a thread of its own, in which nothing may call Ray or take long.
        reference.future().add_done_callback(
            lambda reply: self._events.put(functools.partial(self._settle, ticket, reply.result))
        )

    def _replied(self, reply: Frame) -> None:
        """In the thread of a connection."""
        ticket = self._outstanding.find(reply.number)
        if ticket is not None:  # it may have been settled since, with its group or its step
            self._events.put(functools.partial(self._settle, ticket, functools.partial(_result, reply)))

    def _ended(self, mpmd_idx: int, error: BaseException | None) -> None:
        """In any thread, and once or more."""
        only_noticed = error is None or isinstance(error, EOFError | ConnectionError)
        why = "" if only_noticed else f": {type(error).__name__}: {error}"
        self._events.put(functools.partial(self._cut, mpmd_idx, why))

    def _cut(self, mpmd_idx: int, why: str) -> None:
        since, before = self._cut_off.get(mpmd_idx, (time.monotonic(), ""))
        self._cut_off[mpmd_idx] = since, before or why

    def _serve(self) -> None:
        reason = _WITHOUT_RAY
        try:
            while self._connected():
                try:
                    event = self._events.get(timeout=_POLL_SECONDS)
                    if event is None:
                        reason = "the cluster mesh is closed"
                        break
                    event()
                    del event  # an idle thread must not keep the last result
                except queue.Empty:
                    pass
                self._bury_the_cut_off()
                self._bury_the_stuck()
        except Exception as error:
            # Whatever Ray raises once it was shut down under the mesh: the futures say so. Else a fault.
            if self._connected():
                reason = f"the cluster mesh has failed: {type(error).__name__}: {error}"
                raise
        finally:
            self._outstanding.close(RuntimeError(reason))
            self._release()

    def _settle(self, ticket: Ticket, result: Callable[[], Any]) -> None:
        try:
            value = ticket.decode(result())
        except Exception as raised:
            error = translate(raised, ticket.mpmd_idx)
            if isinstance(error, GroupDiedError):
                self._bury(error)
            else:
                self._tell(self._outstanding.fail(ticket, error))
        else:
            self._outstanding.succeed(ticket, value)

    def _bury(self, error: GroupDiedError) -> None:
        mpmd_idx = error.mpmd_idx
        aborts = self._outstanding.bury(mpmd_idx, error)
        # An actor that is only out of reach has missed calls: it must not come back.
        self._kill(self.actors[mpmd_idx])
        if not self.by_ray:
            self._clients[mpmd_idx].end()
        self._tell(aborts)

    def _bury_the_cut_off(self) -> None:
        now = time.monotonic()
        for mpmd_idx, (since, why) in list(self._cut_off.items()):
            if now - since >= _PATIENCE_SECONDS:
                self._cut_off[mpmd_idx] = (math.inf, why)
                reason = f"group {mpmd_idx} is gone: its connection to the driver has ended{why}"
                self._bury(GroupDiedError(reason, mpmd_idx))

    def _bury_the_stuck(self) -> None:
        """When a step takes long, asks all groups for a sign of life, which no work of theirs delays."""
        now = time.monotonic()
        if now < self._next_ping or not self._outstanding.in_step:
            return
        self._next_ping = now + _PING_SECONDS
        for mpmd_idx, actor in enumerate(self.actors):
            asked = self._pinged.setdefault(mpmd_idx, now)
            if asked == now:
                answer: Future = actor.health.remote().future()
                answer.add_done_callback(lambda _, mpmd_idx=mpmd_idx: self._pinged.pop(mpmd_idx, None))
            elif now - asked >= _STUCK_SECONDS:
                reason = f"group {mpmd_idx} is stuck: its process has not answered for {now - asked:.0f} s"
                self._bury(GroupDiedError(reason, mpmd_idx))

    def _tell(self, aborts: Sequence[Abort]) -> None:
        if self._connected():
            for abort in aborts:
                for actor in self.actors:
                    actor.abort.remote(abort.step, abort.reason)

    def _kill(self, actor: ActorHandle) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be going down at this very moment
            if self._connected():
                ray.kill(actor)

    def _connected(self) -> bool:
        return _session() == self._session

    def close(self) -> None:
        """Fails all calls, kills the actors and gives their resources back. May be called again."""
        self.close_soon()
        if threading.current_thread() is not self._thread:  # a future's callback may close the mesh
            self._thread.join()

    def close_soon(self) -> None:
        """``close`` without waiting for it; may be called by the garbage collector, at any point."""
        if os.getpid() != self._process:  # in a fork, whose descriptors are those of the connections, too
            return
        for client in self._clients:
            client.end()
        self._events.put(None)

    def _release(self) -> None:
        for client in self._clients:
            client.close()
        atexit.unregister(self.close)
        for actor in self.actors:
            self._kill(actor)
        if self._connected():
            remove_placement_group(self._placement_group)


def _result(reply: Frame) -> Any:
    result = reply.open()
    if isinstance(result, ray.exceptions.RayTaskError):
        raise result
    return result


def _session() -> tuple[str, str] | None:
    """Tells one connection of this process to Ray from every other; ``None`` while there is none."""
    try:
        # Not ray.get_runtime_context, which starts Ray where there is none.
        context = ray.runtime_context.get_runtime_context()
        return context.get_node_id(), context.get_job_id()
    except Exception:  # which one depends on how far Ray has shut down
        return None

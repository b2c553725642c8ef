"""The actors of one mesh: calls on them as futures, and one thread that notices how the calls end."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
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
from mpmd.errors import GroupDiedError

_POLL_SECONDS = 1.0
"""How often the thread, when nothing happens, looks whether Ray is still there."""

_PING_SECONDS = 10.0
_STUCK_SECONDS = 60.0
"""A process that has not answered for so long, while a step waits, will not: it is stopped, or hangs."""

_WITHOUT_RAY = "Ray was shut down, and with it the cluster mesh"


@dataclasses.dataclass(frozen=True)
class _Reply:
    ticket: Ticket
    decode: Callable[[Any], Any]
    reply: Future


class Groups:
    """Calls the actors, and watches them: when a step fails anywhere, all groups are told to abort it.

    Args:
      actors: the connected actors, by ``mpmd_idx``.
      placement_group: where they are; it goes when they go.
    """

    def __init__(self, actors: Sequence[ActorHandle], placement_group: PlacementGroup):
        self.actors = tuple(actors)
        self._placement_group = placement_group
        self._session = _session()
        self._outstanding = Outstanding()
        self._pinged: dict[int, float] = {}
        self._next_ping = 0.0
        self._replies: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="mpmd groups", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        for mpmd_idx in range(len(self.actors)):
            self.call(mpmd_idx, "watch")

    def call(
        self, mpmd_idx: int, method: str, *arguments: Any, decode: Callable[[Any], Any] = lambda x: x
    ) -> Future:
        """Calls a method of a group's actor. Returns at once; ``decode`` is applied to what comes back.

        Raises: ``GroupDiedError`` when the group is known to be dead, ``RuntimeError`` after ``close``.
        """
        (ticket,) = self._outstanding.add([mpmd_idx])
        self._send(ticket, method, arguments, decode)
        return ticket.future

    def step(self, step: int, arguments: Mapping[int, tuple]) -> dict[int, Future]:
        """Calls ``step`` on each of the groups, as one step: where one fails, the others are unblocked.

        Raises: as ``call``, when one of the groups is dead; then none is called.
        """
        tickets = self._outstanding.add(arguments, step)
        for ticket in tickets:
            self._send(ticket, "step", arguments[ticket.mpmd_idx], lambda reply: reply)
        return {ticket.mpmd_idx: ticket.future for ticket in tickets}

    def _send(self, ticket: Ticket, method: str, arguments: tuple, decode: Callable[[Any], Any]) -> None:
        if not self._connected():  # Ray would start itself, to be called
            self._outstanding.close(RuntimeError(_WITHOUT_RAY))
            return
        try:
            reference = getattr(self.actors[ticket.mpmd_idx], method).remote(*arguments)
        except Exception as error:  # arguments that cannot be sent; the step's other groups must know
            self._tell(self._outstanding.fail(ticket, error))
            return
        # Ray runs the callback in a thread of its own, in which nothing may call Ray or take long.
        reference.future().add_done_callback(lambda reply: self._replies.put(_Reply(ticket, decode, reply)))

    def _serve(self) -> None:
        reason = _WITHOUT_RAY
        try:
            while self._connected():
                try:
                    item = self._replies.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    self._bury_the_stuck()
                    continue
                if item is None:
                    reason = "the cluster mesh is closed"
                    break
                self._settle(item)
                self._bury_the_stuck()
                del item  # an idle thread must not keep the last result in the object store
        except Exception:
            # Whatever Ray raises once it was shut down under the mesh: the futures say so. Else a fault.
            if self._connected():
                raise
        finally:
            self._outstanding.close(RuntimeError(reason))
            self._release()

    def _settle(self, item: _Reply) -> None:
        mpmd_idx = item.ticket.mpmd_idx
        try:
            result = item.decode(item.reply.result())
        except Exception as raised:
            error = translate(raised, mpmd_idx)
            if isinstance(error, GroupDiedError):
                self._bury(mpmd_idx, error)
            else:
                self._tell(self._outstanding.fail(item.ticket, error))
        else:
            self._outstanding.succeed(item.ticket, result)

    def _bury(self, mpmd_idx: int, error: GroupDiedError) -> None:
        aborts = self._outstanding.bury(mpmd_idx, error)
        # An actor that is only out of reach has missed calls: it must not come back.
        self._kill(self.actors[mpmd_idx])
        self._tell(aborts)

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
                self._bury(mpmd_idx, GroupDiedError(reason, mpmd_idx))

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
        self._replies.put(None)

    def _release(self) -> None:
        for actor in self.actors:
            self._kill(actor)
        if self._connected():
            remove_placement_group(self._placement_group)
        atexit.unregister(self.close)


def _session() -> tuple[str, str] | None:
    """Tells one connection of this process to Ray from every other; ``None`` while there is none."""
    try:
        # Not ray.get_runtime_context, which starts Ray where there is none.
        context = ray.runtime_context.get_runtime_context()
        return context.get_node_id(), context.get_job_id()
    except Exception:  # which one depends on how far Ray has shut down
        return None

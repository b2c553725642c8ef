"""The actors of one mesh: calls on them as futures, and one thread that notices how the calls end."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import multiprocessing
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.errors import translate
from cluster.line import Frame, Line, frame
from cluster.outstanding import Abort, Outstanding, Ticket
from mpmd.errors import GroupDiedError

_POLL_SECONDS = 1.0
"""How often the thread, when nothing happens, looks whether Ray is still there."""

_PING_SECONDS = 10.0
_STUCK_SECONDS = 60.0
"""A process that has not answered for so long, while a step waits, will not: it is stopped, or hangs."""

_PATIENCE_SECONDS = 5.0
"""For so long a group whose line has ended is given to Ray, which knows why it died."""

_WITHOUT_RAY = "Ray was shut down, and with it the cluster mesh"
_CLOSED = "the cluster mesh is closed"


class Groups:
    """Calls the actors, and watches them: when a step fails anywhere, all groups are told to abort it.

    One thread sends requests over the lines, so that no caller waits for the network, and another one takes
    the replies and whatever Ray reports.

    Args:
      actors: the connected actors, by ``mpmd_idx``.
      placement_group: where they are; it goes when they go.
      lines: the driver's end of the line to each of them; empty where all calls are to be Ray's.
    """

    def __init__(
        self, actors: Sequence[ActorHandle], placement_group: PlacementGroup, lines: Sequence[Line] = ()
    ):
        self.actors = tuple(actors)
        self._placement_group = placement_group
        self._lines = tuple(lines)
        self._session = _session()
        self._outstanding = Outstanding()
        self._pinged: dict[int, float] = {}
        self._next_ping = 0.0
        self._cut_off: dict[int, float] = {}  # groups whose line has ended, and since when
        self._requests: queue.SimpleQueue[tuple[Line, Frame] | None] = queue.SimpleQueue()
        # What Ray has answered; None asks for the end. Whatever is added is followed by a byte in the pipe.
        self._answers: collections.deque[tuple[Ticket, Future] | None] = collections.deque()
        self._pipe, self._mouth = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._mouth.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ, self._take_answers)
        for mpmd_idx, line in enumerate(self._lines):
            self._selector.register(line, selectors.EVENT_READ, functools.partial(self._take_reply, mpmd_idx))
        self._sender = threading.Thread(target=self._send, name="mpmd requests", daemon=True)
        self._sender.start()
        self._thread = threading.Thread(target=self._serve, name="mpmd groups", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        for mpmd_idx in range(len(self.actors)):
            self.call_ray(mpmd_idx, "serve" if self._lines else "watch")

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
        """As ``call``, but by Ray in any case: for what is large and the same for many groups."""
        (ticket,) = self._outstanding.add([mpmd_idx])
        self._call_by_ray(ticket, method, arguments)
        return ticket.future

    def step(self, step: int, arguments: Mapping[int, tuple]) -> dict[int, Future]:
        """Calls ``step`` on each of the groups, as one step: where one fails, the others are unblocked.

        Raises: as ``call``, when one of the groups is dead; then none is called.
        """
        tickets = self._outstanding.add(arguments, step)
        for ticket in tickets:
            self._call(ticket, "step", arguments[ticket.mpmd_idx])
        return {ticket.mpmd_idx: ticket.future for ticket in tickets}

    def _call(self, ticket: Ticket, method: str, arguments: tuple) -> None:
        if not self._lines:
            self._call_by_ray(ticket, method, arguments)
            return
        try:
            request = frame((ticket.number, method, arguments))
        except Exception as error:  # arguments that cannot be sent; the step's other groups must know
            self._tell(self._outstanding.fail(ticket, error))
            return
        self._requests.put((self._lines[ticket.mpmd_idx], request))

    def _call_by_ray(self, ticket: Ticket, method: str, arguments: tuple) -> None:
        if not self._connected():  # Ray would start itself, to be called
            self._outstanding.close(RuntimeError(_WITHOUT_RAY))
            return
        try:
            reference = getattr(self.actors[ticket.mpmd_idx], method).remote(*arguments)
        except Exception as error:  # as above
            self._tell(self._outstanding.fail(ticket, error))
            return
        # Ray runs the callback in a thread of its own, in which nothing may call Ray or take long.
        reference.future().add_done_callback(lambda answer: self._notice((ticket, answer)))

    def _notice(self, answer: tuple[Ticket, Future] | None) -> None:
        self._answers.append(answer)
        with contextlib.suppress(BlockingIOError):  # there is enough in the pipe to wake the thread
            os.write(self._mouth.fileno(), b"\0")

    def _send(self) -> None:
        while (item := self._requests.get()) is not None:
            line, request = item
            with contextlib.suppress(OSError):  # the group is gone, which the other thread will see
                line.write(request)
            del item, request  # an idle thread must not keep the last request's arrays

    def _serve(self) -> None:
        reason = _WITHOUT_RAY
        try:
            while self._connected():
                for key, _ in self._selector.select(_POLL_SECONDS):
                    key.data()
                self._bury_the_cut_off()
                self._bury_the_stuck()
        except _Closed:
            reason = _CLOSED
        except Exception:
            # Whatever Ray raises once it was shut down under the mesh: the futures say so. Else a fault.
            if self._connected():
                raise
        finally:
            self._outstanding.close(RuntimeError(reason))
            self._release()

    def _take_answers(self) -> None:
        os.read(self._pipe.fileno(), 4096)
        while self._answers:
            answer = self._answers.popleft()
            if answer is None:
                raise _Closed
            self._settle(answer[0], answer[1].result)

    def _take_reply(self, mpmd_idx: int) -> None:
        line = self._lines[mpmd_idx]
        try:
            number, reply = line.read()
        except (EOFError, OSError):
            self._selector.unregister(line)
            self._cut_off[mpmd_idx] = time.monotonic()
            return
        ticket = self._outstanding.find(number)
        if ticket is not None:
            self._settle(ticket, functools.partial(_result, reply))

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
        if self._lines:
            self._lines[mpmd_idx].end()
        self._tell(aborts)

    def _bury_the_cut_off(self) -> None:
        now = time.monotonic()
        for mpmd_idx, since in list(self._cut_off.items()):
            if now - since >= _PATIENCE_SECONDS:
                del self._cut_off[mpmd_idx]
                reason = f"group {mpmd_idx} is gone: its connection to the driver has ended"
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
        for line in self._lines:
            line.end()  # the threads may be reading or writing
        self._notice(None)

    def _release(self) -> None:
        for actor in self.actors:
            self._kill(actor)
        if self._connected():
            remove_placement_group(self._placement_group)
        self._selector.close()
        self._requests.put(None)
        for line in self._lines:
            line.end()
        self._sender.join()
        for line in self._lines:
            line.close()
        atexit.unregister(self.close)


class _Closed(Exception):
    """The mesh is to be closed."""


def _result(reply: Any) -> Any:
    if isinstance(reply, ray.exceptions.RayTaskError):
        raise reply
    return reply


def _session() -> tuple[str, str] | None:
    """Tells one connection of this process to Ray from every other; ``None`` while there is none."""
    try:
        # Not ray.get_runtime_context, which starts Ray where there is none.
        context = ray.runtime_context.get_runtime_context()
        return context.get_node_id(), context.get_job_id()
    except Exception:  # which one depends on how far Ray has shut down
        return None

"""Waiting for calls on processes of which any may die meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import ray
from ray.actor import ActorHandle

from cluster.driver.calls import health
from cluster.driver.calls.watchdog import NO_LIMITS, Limits
from cluster.protocol.endpoint import Endpoint
from cluster.start.connect import ProcessLostError
from mpmd.errors import MESH_CLOSED

Calls = dict[ray.ObjectRef, int]
"""Calls of Ray that are under way, and the number of the process that each is made on."""

Pings = dict[int, tuple[float, ray.ObjectRef]]
"""The pings that are not answered, by the number of the process: when it was pinged, and the call."""

_POLL_SECONDS = 0.25
"""The seconds between two checks that a wait is still needed, and that those whom it waits for are alive."""


class SupersededError(RuntimeError):
    """The operation under way is not to go on."""


class LivenessWaiter:
    """Waits for processes, and finds the dead ones. Processes are named by their numbers.

    Args:
      actors: the actor of each process; a caller that replaces an actor changes this list.
      processes: the group and rank of each process.
      limits: how long a process may be in one task.

    Attributes:
      stop: is set to end all waits.
    """

    def __init__(self, actors: Sequence[ActorHandle], processes: Sequence[Endpoint], limits: Limits):
        self._actors = actors
        self._processes = processes
        self._limits = limits
        self.stop = threading.Event()

    def wait_for(
        self,
        calls: Calls,
        is_wanted: Callable[[], bool] = lambda: True,
        fetch: bool = True,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """Waits for calls while the called processes live, and raises the errors of the calls.

        An error does not tell whose death has caused it; ``find_dead`` does.

        Args:
          is_wanted: whether to go on waiting.
          fetch: ``False`` for results that are for an actor and not for the driver; that actor raises their
            errors.
          limits: how long a called process may be in one task meanwhile.
        """
        waiting = list(calls)
        pings: Pings = {}
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_SECONDS, fetch_local=False)
            if self.stop.is_set() or not is_wanted():
                raise SupersededError(f"{MESH_CLOSED}, or a group has died")
            if fetch:
                ray.get(ready)
            if not ready:
                self.check_alive({calls[call] for call in waiting}, pings, limits)

    def check_alive(self, numbers: Iterable[int], pings: Pings, limits: Limits = NO_LIMITS) -> None:
        """Pings processes, and reads the answers to earlier pings. Callers keep ``pings`` between calls.

        Raises: ``ProcessLostError`` when a process is dead, does not answer, or exceeds the limits.
        """
        now = time.monotonic()
        for number in numbers:
            if number not in pings:
                pings[number] = now, self._actors[number].health.remote()
            since, ping = pings[number]
            if ray.wait([ping], timeout=0)[0]:
                del pings[number]
                try:
                    doing = ray.get(ping)
                except ray.exceptions.RayActorError as error:
                    raise self._lost(number, f"has died: {error}") from error
                if limits.exclude(doing):
                    raise self._lost(number, f"is stuck: it is {doing}")
            elif now - since > health.UNRESPONSIVE_SECONDS:
                raise self._lost(number, f"has not answered for {now - since:.0f} s")

    def _lost(self, number: int, how: str) -> ProcessLostError:
        process = self._processes[number]
        return ProcessLostError(f"{process.name} {how}", process.mpmd_idx)

    def find_dead(self) -> set[int]:
        """The groups of which a process is gone, does not answer, or is stuck."""
        pings: list[ray.ObjectRef] = [actor.health.remote() for actor in self._actors]
        ray.wait(pings, num_returns=len(pings), timeout=health.PING_SECONDS)
        return {
            process.mpmd_idx
            for process, ping in zip(self._processes, pings, strict=True)
            if not self._is_well(ping)
        }

    def _is_well(self, ping: ray.ObjectRef) -> bool:
        try:
            return not self._limits.exclude(ray.get(ping, timeout=0))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

"""Runs the peers on one workload: sets them up, checks that they compute the same, and times them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.host import Host
from benchmarks.measure import Conditions, Times, interleaved, ratio, seconds_of
from benchmarks.peers import PEERS, TASK_TIMES, Peer
from benchmarks.workload import Setting, Workload
from mpmd.ir.events import Event
from mpmd.ir.plan import Plan, Run

_LOSS_TOLERANCE = 1e-3
_TIMED_STEPS = 2
_PROFILED_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The measured times of a workload.

    Attributes:
      seconds: of a step, by the peer's key.
      steps: how many steps in a row each time is the mean of.
      plan: our plan for it.
      events: when each task of a few steps ran, one after another with a group's share of the threads.
      profiled: what our groups on Ray did in each of a few steps in a row, if that was asked for.
    """

    workload: Workload
    seconds: Mapping[str, Times]
    steps: Mapping[str, int]
    plan: Plan
    events: Sequence[Event]
    profiled: Sequence[Sequence[Event]]

    @property
    def tasks(self) -> int:
        """Executables that our plan runs in a step."""
        return sum(isinstance(i, Run) for program in self.plan.programs for i in program.instructions)

    def median(self, key: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[key])

    def ratio(self, key: str, other: str) -> float:
        """The ratio of the times of two peers."""
        return ratio(self.seconds[key], self.seconds[other])

    def data(self) -> dict:
        """For JSON."""
        return {
            "workload": dataclasses.asdict(self.workload),
            "tasks": self.tasks,
            "seconds_per_step": dict(self.seconds),
            "steps_per_time": dict(self.steps),
        }


def compare(workload: Workload, conditions: Conditions, profile: bool = False) -> Comparison:
    """Times all peers that are wanted and can run here, in turns.

    With ``profile``, ours on Ray notes what it does, in a few more steps.

    Raises: ``RuntimeError`` when a peer fails, or computes something else than the others.
    """
    setting = Setting(workload, conditions.cores, conditions.ray_address)
    effort = conditions.effort
    with contextlib.ExitStack() as stack:
        peers = [peer for peer in PEERS if peer.key in conditions.peers and not peer.missing]
        hosts = _started([TASK_TIMES, *peers], setting, stack)
        task_times = hosts.pop(TASK_TIMES.key)
        losses = {key: [host.call("run", 1)] for key, host in hosts.items()}  # which may still compile
        steps: dict[str, int] = {}
        resting = {peer.key for peer in peers if peer.rests}
        for key, host in hosts.items():
            start = time.perf_counter()
            losses[key].append(host.call("run", 1))
            seconds_per_step = time.perf_counter() - start
            if key in resting:
                host.call("rest")
            steps[key] = effort.steps(seconds_per_step)
            print(f"  {key}: {seconds_per_step:.3g} s for the second step", file=sys.stderr, flush=True)
        _check_losses(losses)
        events: list[Event] = []

        def time_tasks() -> float:
            task_times.call("events", 1)  # as in _seconds_per_step
            events.extend(task_times.call("events", _TIMED_STEPS))
            return 0.0

        things: dict[str, Callable[[], float]] = {
            key: functools.partial(_seconds_per_step, host, steps[key], key in resting)
            for key, host in hosts.items()
        }
        seconds = interleaved({**things, TASK_TIMES.key: time_tasks}, effort.repetitions)
        del seconds[TASK_TIMES.key]
        wanted = profile and "on_ray" in hosts
        profiled = hosts["on_ray"].call("profiled", _PROFILED_STEPS) if wanted else ()
        plan = task_times.call("plan")
        return Comparison(workload, seconds, steps, plan, events, profiled)


def _started(peers: Sequence[Peer], setting: Setting, stack: contextlib.ExitStack) -> dict[str, Host]:
    """Hosts that are ready, by the peer's key. As many start at a time as there are cores."""
    hosts: dict[str, Host] = {}
    starting: collections.deque[Host] = collections.deque()
    for peer in peers:
        if len(starting) == setting.cores:
            starting.popleft().ready()
        print(f"  starts {peer.name}", file=sys.stderr, flush=True)
        host = hosts[peer.key] = peer.start(setting)
        stack.callback(host.close)
        starting.append(host)
    for host in starting:
        host.ready()
    return hosts


def _seconds_per_step(host: Host, steps: int, rests: bool) -> float:
    host.call("run", 1)  # meanwhile others had the caches, and the system may have taken memory back
    seconds = seconds_of(lambda: host.call("run", steps))
    if rests:
        host.call("rest")
    return seconds / steps


def _check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """All peers have the same model, parameters, batch and optimizer; so they have the same losses."""
    expected = next(iter(losses.values()))
    wrong = {
        key: found
        for key, found in losses.items()
        if any(abs(a - b) > _LOSS_TOLERANCE for a, b in zip(found, expected, strict=True))
    }
    if wrong:
        raise RuntimeError(f"the losses of the first two steps are {expected}, but {wrong}")

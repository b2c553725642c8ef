"""Runs the peers on one workload: sets them up, checks that their losses agree, and times them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.frame import Setup, Times, interleaved, ratio, seconds_of
from benchmarks.host import Host
from benchmarks.peers import PEERS, TASK_TIMES, Peer
from benchmarks.workload import Setting, Workload
from mpmd.ir.events import Event
from mpmd.ir.plan import Plan, Run

_LOSS_TOLERANCE, _LOSS_TOLERANCE_OF_GPUS = 1e-3, 2e-2
_TIMED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The measured times of a workload.

    Attributes:
      seconds: of a step, by the peer's key.
      steps: the number of steps in a row of which each time is the mean.
      losses: of the first two steps, by the peer's key.
      plan: our plan of the step.
      events: the tasks of a few steps, run one after another with a group's share of the threads.
    """

    workload: Workload
    seconds: Mapping[str, Times]
    steps: Mapping[str, int]
    losses: Mapping[str, Sequence[float]]
    plan: Plan
    events: Sequence[Event]

    @property
    def tasks(self) -> int:
        """The number of executables that our plan runs in a step."""
        return sum(isinstance(i, Run) for program in self.plan.programs for i in program.instructions)

    def by_name(self) -> dict[str, Times]:
        """The seconds of a step, by the peer's name in tables."""
        return {peer.name: self.seconds[peer.key] for peer in PEERS if peer.key in self.seconds}

    def median(self, key: str) -> float:
        return statistics.median(self.seconds[key])

    def ratio(self, key: str, other: str) -> float:
        return ratio(self.seconds[key], self.seconds[other])

    def loss_difference(self, key: str) -> float:
        """The largest difference between the losses of this peer and of the first peer."""
        expected = next(iter(self.losses.values()))
        return max(abs(a - b) for a, b in zip(self.losses[key], expected, strict=True))


def compare(workload: Workload, setup: Setup) -> Comparison:
    """Times all chosen peers that can run here, in turns.

    Raises: ``RuntimeError`` when a peer fails, or computes other losses than the first peer.
    """
    setting = Setting(workload, setup)
    peers = [peer for peer in PEERS if peer.key in setup.options.peers and peer.runs_on(setting)]
    if any(peer.on_ray for peer in peers):
        setup.join_ray()  # before the peers get the address
    with contextlib.ExitStack() as stack:
        hosts = _started([TASK_TIMES, *peers], setting, stack)
        task_times = hosts.pop(TASK_TIMES.key)
        losses = {key: [host.call("run", 1)] for key, host in hosts.items()}  # which may still compile
        steps: dict[str, int] = {}
        resting = {peer.key for peer in peers if peer.rests}
        for key, host in hosts.items():
            start = time.perf_counter()
            losses[key].append(host.call("run", 1))
            steps[key] = setup.steps(time.perf_counter() - start)
            if key in resting:
                host.call("rest")
        plan = task_times.call("plan")
        compared = Comparison(workload, {}, steps, losses, plan, [])
        _check_losses(compared, _LOSS_TOLERANCE if setup.platform == "cpu" else _LOSS_TOLERANCE_OF_GPUS)
        events: list[Event] = []

        def time_tasks() -> float:
            task_times.call("events", 1)  # as in _seconds_per_step
            events.extend(task_times.call("events", _TIMED_STEPS))
            return 0.0

        things: dict[str, Callable[[], float]] = {
            key: functools.partial(_seconds_per_step, host, steps[key], key in resting)
            for key, host in hosts.items()
        }
        seconds = interleaved({**things, TASK_TIMES.key: time_tasks}, setup.repetitions)
        del seconds[TASK_TIMES.key]
        return dataclasses.replace(compared, seconds=seconds, events=events)


def _started(peers: Sequence[Peer], setting: Setting, stack: contextlib.ExitStack) -> dict[str, Host]:
    """Hosts that are ready, by the peer's key. As many start at a time as there are cores."""
    hosts: dict[str, Host] = {}
    starting: collections.deque[Host] = collections.deque()
    for peer in peers:
        if len(starting) == setting.setup.cores:
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


def _check_losses(compared: Comparison, tolerance: float) -> None:
    """All peers have the same model, parameters, batch and optimizer; so they have the same losses."""
    wrong = [key for key in compared.losses if not compared.loss_difference(key) <= tolerance]  # also for NaN
    if wrong:
        raise RuntimeError(f"losses of {', '.join(wrong)} differ: {dict(compared.losses)}")

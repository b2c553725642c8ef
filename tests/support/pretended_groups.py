"""Groups and processes that only pretend, for the runtime that recovers."""

import dataclasses
import threading
from concurrent.futures import Future

import numpy as np

from cluster.driver.runtime import RayRuntime
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import Recovery
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.runtime import RecoveringRuntime
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import StepReply, StepRequest
from tests.support.processes import endpoints
from tests.support.waiting import await_that

SOON = 20
"""Seconds within which what a test waits for has happened."""

TOGETHER = CopiesLostError("group 0 and group 1, which kept its values, have died together")
"""Why a replacement finds no copy of the values."""


class Calls:
    """In place of ``ActorCalls``: the test answers the calls.

    ``sent`` are the host arrays of each step, for each process, and ``failed`` why it is not to be run.
    """

    by_ray = False

    def __init__(self, processes):
        self.processes = processes
        self.made = []
        self.steps = []
        self.sent = []
        self.failed = []
        self.detached = None
        self.dead = set()

    def ask(self, number, request):
        return self.call_ray(number, type(request).__name__, *vars(request).values())

    def call_ray(self, number, method, *arguments):
        if self.detached is not None:
            raise self.detached
        self.check({number})
        self.made.append((number, method, arguments, Future()))
        return self.made[-1][-1]

    def check(self, numbers):
        for number in self.dead.intersection(numbers):
            raise GroupDiedError(f"group {number} died", number)

    def ask_step(self, requests):
        self.check(requests)
        futures = {number: Future() for number in requests}
        self.steps.append((next(iter(requests.values())).run, futures))
        self.sent.append({number: dict(request.host_arrays) for number, request in requests.items()})
        self.failed.append({request.failed for request in requests.values()})
        for request in requests.values():
            request.host_arrays.clear()  # as who runs the step does
        return dict(futures)

    def named(self, kind):
        """The fields of all requests of a kind, with the process."""
        return [(number, *fields) for number, name, fields, _ in self.made if name == kind]

    def future(self, kind):
        """That of the last request of a kind."""
        return [future for _, name, _, future in self.made if name == kind][-1]

    def death_of(self, mpmd_idx):
        return None

    def close(self):
        pass

    close_soon = close

    def detach(self, reason):
        self.detached = reason
        for *_, future in self.made:
            if not future.done():
                future.set_exception(reason)

    def fail(self, index, *errors):
        for future, error in zip(self.steps[index][1].values(), errors, strict=True):
            future.set_exception(error)

    def reply(self, index, value=1.0):
        for future in self.steps[index][1].values():
            future.set_result(StepReply({7: np.float32(value)}))


class Processes:
    """In place of the running processes. ``failures`` are what the next replacements raise.

    Also in place of their copies, spares and allocations.
    """

    def __init__(self, num_groups=2):
        self.endpoints = endpoints([1] * num_groups)
        self.attempts = []
        self.infos = [ProcessInfo(i, 0, "host", "id", 100 + i, (), ()) for i in range(num_groups)]
        self.actors = ()
        self.spares = self.allocations = self
        self.stop = threading.Event()
        self.failures = []
        self.restored = []
        self.may_replace = threading.Event()
        self.may_replace.set()

    def calls(self, connections, on_death):
        self.on_death = on_death
        self.attempts.append(Calls(self.endpoints))
        return self.attempts[-1]

    def check(self, snapshot):
        assert self.may_replace.wait(SOON)
        if self.failures:
            raise self.failures.pop(0)
        return ()

    def restore(self, snapshot):
        self.restored.append(snapshot)

    def go_back(self, snapshot):
        self.check(snapshot)
        self.restore(snapshot)

    def connect(self):
        return []

    def _do_nothing(self, *arguments):
        pass

    check_open = kill = lose = reset = start = open = await_reset = load = release = _do_nothing


class Whole:
    """In place of ``HostArguments``: each process gets the whole arrays."""

    def packed(self, mpmd_idx, rank, request):
        return dict(request.host_arrays)


class Driven(RecoveringRuntime):
    """Of two groups, and those that are left out. ``attempts`` has the calls of each attempt."""

    def __init__(self, processes, recovery, max_in_flight=16, left_out=()):
        groups = RayRuntime(processes.endpoints, "cpu", {})
        groups._arguments[0], groups._participants[0] = Whole(), tuple(range(len(processes.endpoints)))
        reports = [].append
        super().__init__(groups, processes, processes, recovery, reports, reports, max_in_flight, left_out)
        self._supervisor.attach([])  # nobody looks after the groups
        self.attempts = processes.attempts
        self.changed, self.journal = self._ledger.changed, self._ledger.journal

    @property
    def error(self):
        """Why nothing works any more."""
        return self._ledger.error

    def step(self, host_arrays=None, inputs=(), outputs=(), donated=(), groups=(0, 1)):
        request = StepRequest(0, self.next_step(), inputs, outputs, donated=donated)
        return self.ask(
            {i: dataclasses.replace(request, host_arrays=dict(host_arrays or {})) for i in groups}
        )

    def die(self, mpmd_idx):
        before = len(self.attempts)
        self._processes.on_death(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.attempts) > before or self.error is not None, SOON)


class WithoutSnapshots(Recovery):
    """So that steps never wait for groups to be quiet."""

    def snapshot_is_due(self, journal):
        return False


def runtime(left_out=(), max_in_flight=16):
    """Of groups 0 and 1, and those that are left out."""
    processes = Processes(num_groups=2 + len(left_out))
    return Driven(processes, WithoutSnapshots(every=100), max_in_flight=max_in_flight, left_out=left_out)


def begin_recovery(driven, mpmd_idx):
    """A group dies, and is not replaced before ``end_recovery``."""
    driven._processes.may_replace.clear()
    driven._processes.on_death(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
    await_that(lambda: driven.attempts[-1].detached is not None)


def end_recovery(driven):
    count = len(driven.attempts)
    driven._processes.may_replace.set()
    with driven.changed:
        assert driven.changed.wait_for(lambda: len(driven.attempts) > count, SOON)

"""The calls that the driver waits for, and the consequences of a failure. Knows neither Ray nor JAX.

Events go in: a call was made, it succeeded, it failed, a group died. Futures are settled, and the steps that
the groups have to abort come out.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from cluster.driver.calls.joined import awaited
from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupDiedError, StepAborted, StepTimeoutError


@dataclasses.dataclass(frozen=True)
class PendingCall:
    """One call on one process. The caller holds ``future``, whose result is the reply.

    ``endless``: it ends with the process, so nobody waits for its reply.
    """

    number: int
    process: Endpoint
    step: int | None
    endless: bool
    future: Future


@dataclasses.dataclass
class PendingStep:
    """A run of a step that not all processes have answered.

    Attributes:
      ordinal: the number of the step to people.
      failure: why the step is aborted.
      since, ended, failed: the times at which ``Liveness`` has begun to time it, has ended it because it was
        late, and has noticed its failure.
      is_divided: whether ``Liveness`` has looked for groups that have left the failed step in part.
    """

    run: int
    ordinal: int
    mpmd_idxs: frozenset[int]
    num_pending: int
    failure: BaseException | None = None
    since: float = math.inf
    ended: float | None = None
    failed: float = math.inf
    is_divided: bool = False


class PendingCalls:
    """Holds calls until they are answered. Thread-safe.

    Methods that record a failure return the runs of steps that have failed by it, for the groups to abort.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, PendingCall] = {}
        self._steps: dict[int, PendingStep] = {}
        self._last_steps: dict[int, int] = {}  # of each group
        self._dead: dict[int, GroupDiedError] = {}
        self._closed: BaseException | None = None

    def add(
        self,
        processes: Iterable[Endpoint],
        step: int | None = None,
        ordinal: int = 0,
        endless: bool = False,
    ) -> list[PendingCall]:
        """Adds a call on each of the processes; with ``step``, these calls are that run of a step.

        The runs of a group ascend. ``ordinal`` is the number of the step to people.

        Raises: ``GroupDiedError`` when one of the groups is dead, the error given to ``close`` after it;
        then no call is added.
        """
        processes = tuple(processes)
        mpmd_idxs = frozenset(process.mpmd_idx for process in processes)
        with self._lock:
            for failure in (self._closed, *(self._dead.get(mpmd_idx) for mpmd_idx in sorted(mpmd_idxs))):
                if failure is not None:
                    raise copy_of(failure)
            if step is not None:
                # The groups forget what they know of a step when a later one begins.
                last = max(self._last_steps.get(mpmd_idx, -1) for mpmd_idx in mpmd_idxs)
                assert step > last, f"step {step} comes after step {last}"
                self._last_steps.update(dict.fromkeys(mpmd_idxs, step))
                self._steps[step] = PendingStep(step, ordinal, mpmd_idxs, len(processes))
            calls = [
                PendingCall(
                    number=next(self._numbers),
                    process=process,
                    step=step,
                    endless=endless,
                    future=awaited(),
                )
                for process in processes
            ]
            self._calls.update((call.number, call) for call in calls)
        return calls

    @property
    def are_awaited(self) -> bool:
        with self._lock:
            return not all(call.endless for call in self._calls.values())

    @property
    def oldest_steps(self) -> list[PendingStep]:
        """The steps whose groups have no other step to answer before."""
        oldest: list[PendingStep] = []
        busy: set[int] = set()
        with self._lock:
            for step in self._steps.values():
                if busy.isdisjoint(step.mpmd_idxs):
                    oldest.append(step)
                busy |= step.mpmd_idxs
        return oldest

    @property
    def failed_steps(self) -> list[PendingStep]:
        with self._lock:
            return [step for step in self._steps.values() if step.failure is not None]

    def count_of(self, process: Endpoint) -> int:
        with self._lock:
            return sum(call.process == process and not call.endless for call in self._calls.values())

    def death_of(self, mpmd_idx: int) -> GroupDiedError | None:
        return self._dead.get(mpmd_idx)

    def running(self, step: int) -> list[Endpoint]:
        with self._lock:
            return [call.process for call in self._calls.values() if call.step == step]

    def half_answered(self, step: int) -> list[int]:
        with self._lock:
            pending = [call.process for call in self._calls.values() if call.step == step]
        num_pending = collections.Counter(process.mpmd_idx for process in pending)
        sizes = {process.mpmd_idx: process.num_processes[process.mpmd_idx] for process in pending}
        return [mpmd_idx for mpmd_idx, size in sizes.items() if num_pending[mpmd_idx] < size]

    def find(self, number: int) -> PendingCall | None:
        return self._calls.get(number)

    def succeed(self, call: PendingCall, result: Any) -> None:
        """Settles a call. A call that is already settled does not change."""
        with self._lock:
            pending = self._remove(call)
        if pending:
            call.future.set_result(result)

    def fail(self, call: PendingCall, error: BaseException) -> list[PendingStep]:
        """Settles a call. The first failure of a step is the reason why the step is aborted."""
        aborts: list[PendingStep] = []
        with self._lock:
            if call.step is not None and call.number in self._calls:
                step = self._steps[call.step]
                aborts = self._mark_failed([call.step], error)
                if isinstance(error, StepAborted) and step.failure is not error:
                    if isinstance(
                        step.failure, StepTimeoutError
                    ):  # which no group has for an error of its own
                        timeout = copy_of(step.failure)
                        vars(timeout).update(vars(error))  # what the group has told the driver until then
                        error = timeout
                    else:
                        error.__cause__ = step.failure
            pending = self._remove(call)
        if pending:
            call.future.set_exception(error)
        return aborts

    def time_out(self, step: int, error: StepTimeoutError) -> list[PendingStep]:
        """Records that a step has taken too long. Its calls stay pending until the groups have left it."""
        with self._lock:
            return self._mark_failed([step], error) if step in self._steps else []

    def mark_dead(self, mpmd_idx: int, error: GroupDiedError) -> list[PendingStep]:
        """Records that a group is dead: its calls fail, now and later, and all steps that it takes part in.

        A step fails even if the group's own call has succeeded, because the group's last messages may be
        lost. The calls of such a step fail on all groups at once, before the groups notice the death.
        """
        with self._lock:
            error = self._dead.setdefault(mpmd_idx, error)
            shared = [number for number, step in self._steps.items() if mpmd_idx in step.mpmd_idxs]
            aborts = self._mark_failed(shared, error)
            lost = [c for c in self._calls.values() if c.process.mpmd_idx == mpmd_idx or c.step in shared]
            for call in lost:
                self._remove(call)
        for call in lost:
            call.future.set_exception(copy_of(error))
        return aborts

    def close(self, error: BaseException) -> None:
        """Fails every call, now and later, with ``error``."""
        with self._lock:
            self._closed = self._closed or error
            calls = list(self._calls.values())
            self._calls.clear()
            self._steps.clear()
        for call in calls:
            call.future.set_exception(copy_of(error))

    def _mark_failed(self, steps: Iterable[int], error: BaseException) -> list[PendingStep]:
        failed_now = [step for step in map(self._steps.__getitem__, steps) if step.failure is None]
        for step in failed_now:
            step.failure = error
        return failed_now

    def _remove(self, call: PendingCall) -> bool:
        if self._calls.pop(call.number, None) is None:
            return False
        if call.step is not None:
            step = self._steps[call.step]
            step.num_pending -= 1
            if not step.num_pending:
                del self._steps[call.step]
        return True


def copy_of(error: BaseException) -> BaseException:
    """An equal error. If several threads raised the same one, it would collect all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy

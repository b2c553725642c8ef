"""The requests to groups since the last committed snapshot, to repeat after a death.

The journal is the memory of recovery: a log of requests, with the answers that the user was given, and the
snapshots that were begun and committed. It decides which answers are final, which answers the user gets, when
a snapshot counts, and which requests to repeat when a group has died. It knows no group, thread or clock:
events go in and outcomes come out.

- A *snapshot* is a request, too: each group copies its values between the same two steps. It is *committed*
  when all copies are where they outlive their group, and everything asked before is answered. Then the log
  before it is forgotten.
- A snapshot that fails is given up: the snapshot before it stays in force, and the log grows. A snapshot that
  is under way when a death is noted has not failed: it is asked again with the log, under a new number. If
  its copy fails before the death is noted, it is given up as well.
- A result is given to the user at once. An error is given only when the whole request, and all that was asked
  before, is answered: until then it may be a consequence of a death that is not known yet.
- The results of a step that is recorded are given together, when all groups have answered in one attempt:
  their times belong to one run.
- When a group dies, all groups go back to the committed snapshot, and are asked all that the log has, in the
  same order. The user is told nothing twice; a small result that was given and now differs is an error.
- A copy that is to be written to storage has to be made again where it was, so a snapshot behind it counts
  only when it is written. A step may not wait for that: rather, the copy is forgotten.
- When a step fails that has taken inputs over, all groups go back as well, to where its inputs are there. It
  is not run again, nor are the steps that read its results.
- When no process has the committed snapshot of a group, nothing can be asked again, and all is forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cluster.recovery.logged import Asked, Logged, LoggedSnapshot, LoggedStep
from mpmd.errors import StepAborted
from mpmd.runtime.requests import CopyOut, Fetch, Handle, Released, Request, StepReply, StepRequest

BEGINNING = 0
"""The number of the snapshot that is committed from the start: groups have no values."""


class Outcome(NamedTuple):
    """The answer of one group: its result, or its error if it has one."""

    request: Asked
    mpmd_idx: int
    result: Any = None
    error: BaseException | None = None


class ResultChangedError(RuntimeError):
    """A repeated request has had another result than the first time, or failed with ``error``."""

    def __init__(self, request: Asked, mpmd_idx: int, error: BaseException | None = None):
        what = "gave another result" if error is None else "failed"
        why = "" if error is None else f": {error}"
        super().__init__(
            f"{request} {what} on group {mpmd_idx} when it was repeated after a failure{why}. "
            "Recovery needs steps that compute the same bits each time, and checkpoints that stay"
        )
        self.mpmd_idx = mpmd_idx
        self.__cause__ = error


class Journal:
    """The log of requests, and the snapshots. Not thread-safe.

    Attributes:
      attempt: how often the groups have gone back. Answers name the attempt that they are answers in.
      committed: the number of the snapshot to go back to.
      failed: the step because of which groups are to go back now.
    """

    def __init__(self) -> None:
        self._log: list[Logged] = []
        self._snapshots = itertools.count(BEGINNING + 1)
        self._dropped: set[Asked] = set()  # copies
        self._is_suspended = False
        self.attempt = 0
        self.num_asked = 0  # steps
        self.committed = BEGINNING
        self.failed: LoggedStep | None = None

    # What is asked.

    def add(self, requests: Mapping[int, Request], released: Mapping[int, Released] | None = None) -> Asked:
        """Logs requests to groups, which repeat them after a death; copies, until ``drop_copies``.

        Args:
          released: by group, the values to drop before the group answers.
        """
        is_step = any(isinstance(request, StepRequest) for request in requests.values())
        asked = LoggedStep(requests, released or {}) if is_step else Asked(requests, released or {})
        self._log.append(asked)
        self.num_asked += is_step
        return asked

    def begin_snapshot(self, released: Mapping[int, Released]) -> LoggedSnapshot:
        """Groups are asked to copy their values; one snapshot at a time."""
        assert self.snapshot is None, f"snapshot {self.snapshot} is still under way"
        snapshot = LoggedSnapshot(next(self._snapshots), released)
        self._log.append(snapshot)
        return snapshot

    def abandon(self, snapshot: LoggedSnapshot) -> None:
        """Removes a snapshot that not all groups were asked for; the caller releases its values again."""
        self._log.remove(snapshot)

    def fail_snapshot(self, snapshot: LoggedSnapshot) -> None:
        """Values could not be copied. What groups were to drop before has to be released again."""
        snapshot.has_failed = True

    def find_copy(self, copy: Handle) -> Asked | None:
        """The record of a request for a copy; ``None`` when the copy would not be made again."""
        return next((entry for entry in self._copies if copy in _copies_of(entry)), None)

    @property
    def _copies(self) -> Iterator[Asked]:
        for entry in self._asked:
            if entry.kind is CopyOut and entry not in self._dropped:
                yield entry

    @property
    def _asked(self) -> Iterator[Asked]:
        return (entry for entry in self._log if isinstance(entry, Asked))

    @property
    def _steps(self) -> list[LoggedStep]:
        return [entry for entry in self._log if isinstance(entry, LoggedStep)]

    @property
    def keeps_copies(self) -> bool:
        return any(True for _ in self._copies)

    @property
    def snapshot(self) -> LoggedSnapshot | None:
        snapshots = (entry for entry in self._log if isinstance(entry, LoggedSnapshot))
        return next((snapshot for snapshot in snapshots if not snapshot.has_failed), None)

    @property
    def num_failed(self) -> int:
        """The snapshots that have failed since the last one that is committed, or since groups went back."""
        return sum(isinstance(entry, LoggedSnapshot) and entry.has_failed for entry in self._log)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """The bytes of the host arrays in the log."""
        return sum(step.nbytes for step in self._steps)

    @property
    def steps_since_snapshot(self) -> int:
        """The steps asked since the last snapshot was begun."""
        since = 0
        for entry in reversed(self._log):
            if isinstance(entry, LoggedSnapshot):
                break
            since += isinstance(entry, LoggedStep)
        return since

    @property
    def repeatable(self) -> tuple[Asked, ...]:
        """The requests that have made the values since the snapshot, in order."""
        return tuple(entry for entry in self._asked if entry.makes_values)

    # What is answered.

    def answer(self, attempt: int, outcome: Outcome) -> list[Outcome]:
        """A group has answered, by an error that is not the death of a group, or else by a result.

        Returns: what the user is to be told now.
        Raises: ``ResultChangedError`` when the user was given another result in an earlier attempt.
        """
        request, mpmd_idx, result, error = outcome
        if attempt != self.attempt or mpmd_idx not in request.waiting:
            return []
        request.waiting.remove(mpmd_idx)
        if isinstance(request, LoggedStep):
            request.events.pop(mpmd_idx, None)
        if error is not None:
            request.errors[mpmd_idx] = error
            return self._go_on()
        if isinstance(request, LoggedStep):
            request.events[mpmd_idx] = result.events
        if mpmd_idx not in request.answers:
            request.results[mpmd_idx] = result
        elif not _repeats(request.answers[mpmd_idx], result):
            raise ResultChangedError(request, mpmd_idx)
        is_whole = not request.waiting and not request.errors
        outcomes = _give_results(request) if is_whole or not request.is_of_one_attempt else []
        return outcomes + self._go_on()

    def drop_copies(self, copies: Collection[Handle] | None = None) -> list[Outcome]:
        """These copies, or all, need not be made again: they are written, or nobody waits for them.

        One that is not answered yet still will be. As ``answer``.
        """
        for entry in list(self._copies):
            if copies is None or not _copies_of(entry).isdisjoint(copies):
                self._dropped.add(entry)
        return [] if self._is_suspended else self._go_on()

    def mark_copied(self, attempt: int, snapshot: LoggedSnapshot) -> list[Outcome]:
        """All copies of a snapshot are where they outlive their group. As ``answer``."""
        if attempt != self.attempt:
            return []
        snapshot.is_copied = True
        return self._go_on()

    def _go_on(self) -> list[Outcome]:
        """Returns outcomes that are final now, drops log entries that no replay needs, commits snapshots."""
        outcomes: list[Outcome] = []
        kept: list[Logged] = []
        for position, entry in enumerate(self._log):
            if isinstance(entry, LoggedSnapshot):
                if not entry.is_copied or any(_is_copy(before) for before in kept):
                    kept.append(entry)
                    continue
                self.committed = entry.number
                kept.clear()
                continue
            if entry.waiting:
                kept += self._log[position:]
                break
            failed = entry if isinstance(entry, LoggedStep) and entry.has_taken_over else None
            believed = self._believed_errors(entry)
            outcomes += _give_results(entry) + believed
            if failed is not None:
                self._give_up(position, believed)
                self.failed = failed
                kept += self._log[position:]  # a snapshot behind it lacks the inputs
                break
            if not self._is_done(entry):
                kept.append(entry)
        self._log = kept
        self._dropped.intersection_update(entry for entry in kept if isinstance(entry, Asked))
        return outcomes

    def _give_up(self, position: int, outcomes: Sequence[Outcome]) -> None:
        """Gives up the failed step at ``position`` of the log, and the later steps that read its results."""
        errors = [outcome.error for outcome in outcomes]
        error = min(errors, key=lambda error: isinstance(error, StepAborted))
        reason = f"{error}. The MpmdArrays that the step was donated are as they were before it"
        lost: set[Handle] = set()
        for step in (entry for entry in self._log[position:] if isinstance(entry, LoggedStep)):
            requests = step.steps.values()
            if step is self._log[position] or any(lost.intersection(each.inputs) for each in requests):
                step.give_up(reason)
                lost.update(handle for each in requests for handle in each.outputs)

    def _is_done(self, answered: Asked) -> bool:
        """Whether an answered request need not be asked again, whatever happens."""
        return answered.kind is Fetch or answered in self._dropped

    def _believed_errors(self, request: Asked) -> list[Outcome]:
        outcomes = []
        for mpmd_idx, error in request.errors.items():
            if mpmd_idx not in request.answers:
                request.answers[mpmd_idx] = None
                outcomes.append(Outcome(request, mpmd_idx, None, error))
            elif request.answers[mpmd_idx] is not None:
                raise ResultChangedError(request, mpmd_idx, error)
        request.errors.clear()
        return outcomes

    # Going back.

    def current_step(self, mpmd_idx: int) -> LoggedStep | None:
        return next((step for step in self._steps if mpmd_idx in step.waiting), None)

    def suspend(self) -> None:
        """A group has died: nothing that is answered from now on counts, until the groups have gone back."""
        self.attempt += 1
        self._is_suspended = True

    def go_back(self) -> tuple[Logged, ...]:
        """All groups have the values of the snapshot ``committed``. Returns what to ask them, in order."""
        self.attempt += 1
        self._is_suspended = False
        self.failed = None
        self._log = [
            entry
            for entry in self._log
            if not (
                entry.has_failed
                if isinstance(entry, LoggedSnapshot)
                else entry.answers and self._is_done(entry)
            )
        ]
        for entry in self._log:
            if isinstance(entry, LoggedSnapshot):
                entry.number, entry.is_copied = next(self._snapshots), False
            else:
                entry.waiting.update(entry.groups)
                entry.errors.clear()
                entry.results.clear()
        return tuple(self._log)

    @property
    def unasked(self) -> tuple[Asked, ...]:
        """The requests since all was quiet, for groups that were not asked meanwhile."""
        return tuple(entry for entry in self._asked if entry.waiting)

    def lose_values(self, error: BaseException) -> list[Outcome]:
        """No process has a value any more: fails unanswered requests with ``error``, and empties the log."""
        outcomes = [
            Outcome(entry, mpmd_idx, None, error)
            for entry in self._asked
            for mpmd_idx in sorted(entry.groups - entry.answers.keys())
        ]
        self._log.clear()
        self._dropped.clear()
        self.failed = None
        self.committed = BEGINNING
        return outcomes

    @property
    def programs(self) -> set[int]:
        return {request.program for step in self._steps for request in step.steps.values()}


def _is_copy(entry: Logged) -> bool:
    return isinstance(entry, Asked) and entry.kind is CopyOut


def _copies_of(entry: Asked) -> set[Handle]:
    return {request.copy for request in entry.requests.values() if isinstance(request, CopyOut)}


def _give_results(request: Asked) -> list[Outcome]:
    """Makes new results the user's answers from now on, and returns these as outcomes."""
    outcomes = []
    for mpmd_idx, result in request.results.items():
        request.answers[mpmd_idx] = dict(result.inline) if isinstance(result, StepReply) else None
        outcomes.append(Outcome(request, mpmd_idx, result, None))
    request.results.clear()
    return outcomes


def _repeats(earlier: Mapping[Handle, np.ndarray] | None, reply: StepReply) -> bool:
    """Whether a reply has the bits that the user was given; after an error there is nothing to compare."""
    return earlier is None or all(
        handle in reply.inline and array.tobytes() == reply.inline[handle].tobytes()
        for handle, array in earlier.items()
    )

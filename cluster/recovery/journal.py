"""The requests to groups since the last committed snapshot, to repeat after a death.

The journal is the memory of recovery: a log of requests, with the answers that the user was given, and the
snapshots that were begun and committed. It decides which answers are final, which answers the user gets, when
a snapshot counts, and which requests to repeat when a group has died. It knows no group, thread or clock:
events go in and outcomes come out.

- A *snapshot* is begun when groups have answered all requests: each group copies its values. It is
  *committed* when all copies are where they outlive their group. Then the log before it is forgotten.
- A snapshot that fails, or that is under way when groups go back, is given up: the snapshot before it stays
  in force, and the log grows.
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

from cluster.recovery.logged import Asked, LoggedSnapshot, LoggedStep
from mpmd.errors import RecoveryError, StepAborted
from mpmd.runtime.requests import CopyOut, Fetch, Handle, Read, Released, Request, StepReply, StepRequest

FROM_DISK = "Start again from a checkpoint on disk"

BEGINNING = 0
"""The number of the snapshot that is committed from the start: groups have no values."""


class Outcome(NamedTuple):
    request: Asked
    mpmd_idx: int
    result: Any = None
    error: BaseException | None = None


def changed_result(request: Asked, mpmd_idx: int, error: BaseException | None = None) -> RecoveryError:
    what = "gave another result" if error is None else "failed"
    why = "" if error is None else f": {error}"
    changed = RecoveryError(
        f"{request} {what} on group {mpmd_idx} when it was repeated after a failure{why}. "
        f"Recovery needs steps that compute the same bits each time, and checkpoints that stay. {FROM_DISK}",
        mpmd_idx,
    )
    changed.__cause__ = error
    return changed


class Journal:
    """The log of requests, and the snapshots. Not thread-safe.

    Attributes:
      attempt: how often the groups have gone back. Answers name the attempt that they are answers in.
      is_suspended: whether groups are about to go back, so that no answer counts.
      num_asked: the steps that were ever asked.
      num_failed: the snapshots that have failed since the last that is committed, or since groups went back.
      committed: the number of the snapshot to go back to.
      snapshot: the snapshot under way.
      failed: the step because of which groups are to go back now.
    """

    def __init__(self) -> None:
        self._log: list[Asked] = []
        self._snapshots = itertools.count(BEGINNING + 1)
        self._num_before_snapshot = 0  # steps asked before the last snapshot was begun
        self.attempt = 0
        self.is_suspended = False
        self.num_asked = 0
        self.num_failed = 0
        self.committed = BEGINNING
        self.snapshot: LoggedSnapshot | None = None
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
        assert self.snapshot is None, f"snapshot {self.snapshot} is still under way"
        assert not self.unasked, "groups have not answered all requests"
        self.snapshot = LoggedSnapshot(next(self._snapshots), released, frozenset(self._log))
        self._num_before_snapshot = self.num_asked
        return self.snapshot

    def fail_snapshot(self) -> None:
        """Values could not be copied. What groups were to drop before has to be released again."""
        self.snapshot = None
        self.num_failed += 1

    def find_copy(self, copy: Handle) -> Asked | None:
        """The record of a request for a copy; ``None`` when the copy would not be made again."""
        return next((entry for entry in self._copies if copy in _copies_of(entry)), None)

    @property
    def _copies(self) -> Iterator[Asked]:
        for entry in self._log:
            if entry.kind is CopyOut and not entry.is_dropped:
                yield entry

    @property
    def _steps(self) -> list[LoggedStep]:
        return [entry for entry in self._log if isinstance(entry, LoggedStep)]

    @property
    def keeps_copies(self) -> bool:
        return any(True for _ in self._copies)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self._steps)

    @property
    def steps_since_snapshot(self) -> int:
        """The steps asked since the last snapshot was begun, or since the snapshot that groups have again."""
        return self.num_asked - self._num_before_snapshot

    @property
    def repeatable(self) -> tuple[Asked, ...]:
        """The requests that make or read values."""
        return tuple(entry for entry in self._log if entry.kind in (StepRequest, Read))

    # What is answered.

    def answer(self, attempt: int, outcome: Outcome) -> list[Outcome]:
        """A group has answered, by an error that is not the death of a group, or else by a result.

        Returns: what the user is to be told now.
        Raises: ``RecoveryError`` when the user was given another result in an earlier attempt.
        """
        request, mpmd_idx, result, error = outcome
        if attempt != self.attempt or mpmd_idx not in request.waiting:
            return []
        request.waiting.remove(mpmd_idx)
        if isinstance(request, LoggedStep):
            request.messages.pop(mpmd_idx, None)
        if error is not None:
            request.errors[mpmd_idx] = error
            return self._go_on()
        if isinstance(request, LoggedStep):
            request.messages[mpmd_idx] = result.messages
        if mpmd_idx not in request.answers:
            request.results[mpmd_idx] = result
        elif not _repeats(request.answers[mpmd_idx], result):
            raise changed_result(request, mpmd_idx)
        is_whole = not request.waiting and not request.errors
        outcomes = _give_results(request) if is_whole or not request.is_of_one_attempt else []
        return outcomes + self._go_on()

    def drop_copies(self, copies: Collection[Handle] | None = None) -> None:
        """These copies, or all, need not be made again: they are written, or nobody waits for them.

        A copy that is not answered yet still will be.
        """
        for entry in self._copies:
            entry.is_dropped = copies is None or not _copies_of(entry).isdisjoint(copies)
        self._commit()

    def mark_copied(self, attempt: int, snapshot: LoggedSnapshot) -> None:
        if attempt == self.attempt:
            snapshot.is_copied = True
            self._commit()

    def _commit(self) -> None:
        """Commits the snapshot under way, unless a copy before it has to be made again, or groups go back."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.is_copied or self.is_suspended:
            return
        if snapshot.covered.isdisjoint(self._copies):
            self.committed, self.snapshot, self.num_failed = snapshot.number, None, 0
            self._log = [entry for entry in self._log if entry not in snapshot.covered]

    def _go_on(self) -> list[Outcome]:
        """Returns outcomes that are final now, and drops log entries that no replay needs."""
        outcomes: list[Outcome] = []
        kept: list[Asked] = []
        for position, entry in enumerate(self._log):
            if entry.waiting:
                kept += self._log[position:]
                break
            failed = entry if isinstance(entry, LoggedStep) and entry.has_taken_over else None
            believed = self._believed_errors(entry)
            outcomes += _give_results(entry) + believed
            if failed is not None:
                self._give_up(position, believed)
                self.failed = failed
                kept += self._log[position:]
                break
            if not self._is_done(entry):
                kept.append(entry)
        self._log = kept
        return outcomes

    def _give_up(self, position: int, outcomes: Sequence[Outcome]) -> None:
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
        return answered.kind is Fetch or answered.is_dropped

    def _believed_errors(self, request: Asked) -> list[Outcome]:
        outcomes = []
        for mpmd_idx, error in request.errors.items():
            if mpmd_idx not in request.answers:
                request.answers[mpmd_idx] = None
                outcomes.append(Outcome(request, mpmd_idx, None, error))
            elif request.answers[mpmd_idx] is not None:
                raise changed_result(request, mpmd_idx, error)
        request.errors.clear()
        return outcomes

    # Going back.

    def current_step(self, mpmd_idx: int) -> LoggedStep | None:
        return next((step for step in self._steps if mpmd_idx in step.waiting), None)

    def suspend(self) -> None:
        """A group has died: nothing that is answered from now on counts, until the groups have gone back."""
        self.attempt += 1
        self.is_suspended = True

    def go_back(self) -> tuple[Asked, ...]:
        """All groups have the values of the snapshot ``committed``. Returns what to ask them, in order."""
        self.attempt += 1
        self.is_suspended = False
        self.failed = self.snapshot = None
        self.num_failed = 0
        self._log = [entry for entry in self._log if not (entry.answers and self._is_done(entry))]
        self._num_before_snapshot = self.num_asked - self.num_steps
        for entry in self._log:
            entry.waiting.update(entry.groups)
            entry.errors.clear()
            entry.results.clear()
        return tuple(self._log)

    @property
    def unasked(self) -> tuple[Asked, ...]:
        """The requests since all was quiet, for groups that were not asked meanwhile."""
        return tuple(entry for entry in self._log if entry.waiting)

    def lose_values(self, error: BaseException) -> list[Outcome]:
        outcomes = [
            Outcome(entry, mpmd_idx, None, error)
            for entry in self._log
            for mpmd_idx in sorted(entry.groups - entry.answers.keys())
        ]
        self._log.clear()
        self.failed = self.snapshot = None
        self.committed = BEGINNING
        return outcomes

    @property
    def programs(self) -> set[int]:
        return {request.program for step in self._steps for request in step.steps.values()}


def _copies_of(entry: Asked) -> set[Handle]:
    return {request.copy for request in entry.requests.values() if isinstance(request, CopyOut)}


def _give_results(request: Asked) -> list[Outcome]:
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

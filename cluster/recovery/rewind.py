"""Going back to the last snapshot with nobody dead, to repeat the steps since: a part of ``membership``.

All groups have answered before it begins, and have the same values again when it has ended, so neither the
journal nor the user notices it. What groups answer meanwhile is compared, and told to nobody.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.comparison import Difference, FaultKind, Replies, Run, differences
from cluster.recovery.corruption import Finding, replica_findings
from cluster.recovery.events import Repeated
from cluster.recovery.journal import Journal, ResultChangedError
from cluster.recovery.logged import LoggedRead, LoggedStep
from cluster.recovery.report import CorruptionReport, FoundValue
from mpmd.errors import GroupDiedError, NonFiniteError, StepTimeoutError
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import StepReply, captured_in


class Verdict(enum.Enum):
    """The result of the comparison of some runs."""

    EQUAL = "equal"
    OTHER_ONCE = "once"
    """One run differs from two others, which are equal."""
    CONTRADICTORY = "contradictory"
    """No two of three runs are equal."""


@dataclasses.dataclass
class Rewind:
    """Steps are repeated until two runs of them are equal, three times at most.

    Attributes:
      number: of the rewind; answers and jobs name it.
      refused: the values that are errors the next time; ``None`` for an ordinary run.
      is_working: groups have gone back, or are about to.
      has_gone_back: groups have the values of repeated steps, or those of the snapshot.
      found: the first of the refused values.
      runs: those that have ended, the first of them before the rewind.
      kept: the tasks that groups have kept, because they have made such a value.
      damaged: what is said of copies of the snapshot that have changed.
      late: the error of a repeated step that took too long, after which runs cannot be compared.
    """

    number: int
    refused: NonFinitePolicy | None = None
    is_working: bool = False
    has_gone_back: bool = False
    is_over: bool = False
    found: FoundValue | None = None
    runs: list[Run] = dataclasses.field(default_factory=list)
    kept: list[do.KeptHere] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)
    late: StepTimeoutError | None = None
    _entries: tuple[LoggedStep | LoggedRead, ...] = ()
    _replies: dict[int, dict[int, StepReply | None]] = dataclasses.field(default_factory=dict)
    _waiting: set[tuple[LoggedStep | LoggedRead, int]] = dataclasses.field(default_factory=set)
    _has_failed: bool = False

    @property
    def has_repeated(self) -> bool:
        """Whether groups have answered all that they were asked again."""
        return not self._waiting

    def begin(self, journal: Journal) -> Actions:
        """All is quiet. Without steps since the snapshot, there is nothing to repeat."""
        self._entries = journal.repeatable
        self._replies = _replies_so_far(self._entries)
        self.is_over = not any(isinstance(entry, LoggedStep) for entry in self._entries)
        self.is_working = not self.is_over
        return [] if self.is_over else [do.TakeDigests(self.number)]

    def go_on(self, job: do.RewindJob, result: object, snapshot: int) -> Actions:
        """A job has ended, and no group has died."""
        match job, result:
            case do.TakeDigests(), tuple(processes):
                return self._end_run(processes, snapshot)
            case do.GoBack(), tuple(damaged):
                self.has_gone_back = True
                self.damaged += damaged
                return self._repeat()
            case do.AwaitRepeated(), _:
                return self._end_steps(snapshot)
        raise AssertionError(f"{job} with {result} is no end of a job of a rewind")

    def _repeat(self) -> Actions:
        self._replies, self._has_failed = {}, False
        self._waiting = {(entry, mpmd_idx) for entry in self._entries for mpmd_idx in entry.groups}
        return [do.Repeat(self.number, self._entries, self.refused), do.AwaitRepeated(self.number)]

    def note(self, repeated: Repeated) -> None:
        """A group has answered what it was asked again.

        Raises: ``ResultChangedError`` when it cannot read from storage again what it has read before.
        """
        entry, mpmd_idx, error = repeated.request, repeated.mpmd_idx, repeated.error
        if isinstance(error, GroupDiedError):
            return  # the death itself is noted
        self._waiting.discard((entry, mpmd_idx))
        self._has_failed |= error is not None
        if isinstance(error, StepTimeoutError):
            self.late = self.late or error
        if isinstance(entry, LoggedRead) and error is not None and entry.answers[mpmd_idx] is not None:
            raise ResultChangedError(entry, mpmd_idx, error)
        if not isinstance(entry, LoggedStep):
            return
        if entry.ordinal in self.runs[0].replies:
            reply = repeated.result if error is None else None
            self._replies.setdefault(entry.ordinal, {})[mpmd_idx] = reply
        is_first = self.found is None or entry.ordinal < self.found.step
        if isinstance(error, NonFiniteError) and (captured := captured_in(error)) is not None:
            program = entry.requests[mpmd_idx].program
            self.kept.append(do.KeptHere(entry.ordinal, program, captured, error))
        if isinstance(error, NonFiniteError) and is_first:
            self.found = FoundValue(entry.ordinal, error.label, error.mpmd_idx, str(error))

    def _end_steps(self, snapshot: int) -> Actions:
        refused, self.refused = self.refused, None
        if refused is not None and self._has_failed:  # groups have stopped in the middle
            return [do.GoBack(self.number, snapshot)]
        return [do.TakeDigests(self.number)]

    def _end_run(self, processes: tuple[ProcessDigests, ...], snapshot: int) -> Actions:
        self.runs.append(Run(self._replies, processes))
        is_first = len(self.runs) == 1
        self.is_over = len(self.runs) == 3 or (not is_first and self.verdict is Verdict.EQUAL)
        return [] if self.is_over else [do.GoBack(self.number, snapshot)]

    # What the runs say.

    @property
    def verdict(self) -> Verdict:
        """The result of the comparison so far."""
        if len(self.runs) < 2 or (len(self.runs) == 2 and not self._between(0, 1)):
            return Verdict.EQUAL
        is_once = len(self.runs) == 3 and not (self._between(1, 2) and self._between(0, 2))
        return Verdict.OTHER_ONCE if is_once else Verdict.CONTRADICTORY

    @property
    def differing(self) -> tuple[Difference, ...]:
        """The first differences of the runs; where the last two differ, theirs, which have tasks."""
        if len(self.runs) < 3:
            return ()
        return self._between(1, 2) or self._between(0, 1)

    @property
    def answers(self) -> Replies | None:
        """The right replies, as far as runs agree; ``None`` when no two of them do."""
        return self.runs[-1].replies if self.runs and self.verdict is not Verdict.CONTRADICTORY else None

    def _between(self, one: int, other: int) -> tuple[Difference, ...]:
        made = {
            handle
            for entry in self._entries
            if isinstance(entry, LoggedStep)
            for request in entry.requests.values()
            for handle in request.outputs
        }
        return differences(self.runs[one], self.runs[other], made)


def corruption_findings(rewind: Rewind) -> list[Finding]:
    """The wrong bits that a rewind has noticed. Copies are compared, where no run explains the difference."""
    findings = [corrupted_copies(rewind, [text]) for text in dict.fromkeys(rewind.damaged)]
    processes, verdict = rewind.runs[-1].processes, rewind.verdict
    if verdict is not Verdict.CONTRADICTORY:
        findings += replica_findings(processes, _NOT_REPEATED)
    if verdict is Verdict.EQUAL:
        return findings
    then = _ONCE if verdict is Verdict.OTHER_ONCE else _CONTRADICTORY
    reported = [Finding(each, CorruptionReport.of(each, processes, then)) for each in rewind.differing]
    return findings + reported


def corrupted_copies(rewind: Rewind, damaged: Sequence[str]) -> Finding:
    """Copies of a snapshot that have changed where they were kept."""
    difference = Difference(FaultKind.COPY, (), None, text=" and ".join(damaged))
    return Finding(difference, CorruptionReport.of(difference, rewind.runs[0].processes, _OTHER_COPY))


_ONCE = "Of three runs of the steps two agree, and groups go on from these"
_CONTRADICTORY = "No two of three runs of the steps agree: the values of all groups may be wrong"
_NOT_REPEATED = "It may have been so before the steps that were repeated"
_OTHER_COPY = "Nothing was computed from it"


def _replies_so_far(entries: Sequence[LoggedStep | LoggedRead]) -> dict[int, dict[int, StepReply | None]]:
    """The answers of groups to steps, as far as they are kept; without the steps that have failed."""
    replies: dict[int, dict[int, StepReply | None]] = {}
    for step in entries:
        if isinstance(step, LoggedStep):
            replies[step.ordinal] = {
                mpmd_idx: StepReply(inline, events=step.events.get(mpmd_idx, ()))
                for mpmd_idx, inline in step.answers.items()
                if inline is not None
            }
    return {
        step.ordinal: replies[step.ordinal]
        for step in entries
        if isinstance(step, LoggedStep) and len(replies[step.ordinal]) == len(step.groups)
    }

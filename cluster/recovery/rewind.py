"""Going back to the last snapshot with nobody dead, to repeat the steps since: a part of ``membership``.

All groups have answered before a rewind begins. Afterwards they have the values of the repeated run, which
are the same bits unless wrong bits are reported. The driver compares the answers of the repeated run, and
gives them to nobody.
"""

from __future__ import annotations

import dataclasses

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.comparison import Run
from cluster.recovery.events import Repeated
from cluster.recovery.journal import Journal, ResultChangedError
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.report import FoundValue
from mpmd.errors import GroupDiedError, NonFiniteError, StepTimeoutError
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import StepReply, sent_with


@dataclasses.dataclass
class Rewind:
    """The steps since the last snapshot are repeated once, and once more after a search for NaNs.

    Attributes:
      number: the number of the rewind; answers and jobs name it.
      refused: the values that are errors in the next run of the steps; ``None`` for an ordinary run.
      is_working: groups have gone back, or are about to.
      has_gone_back: groups have the values of repeated steps, or of the snapshot.
      found: the first of the refused values.
      runs: the run before the rewind, and the repeated run, when they have ended.
      kept: the tasks that groups have kept, because they have made a refused value.
      damaged: texts about copies of the snapshot that have changed.
      late: the error of a repeated step that took too long, after which runs cannot be compared.
    """

    number: int
    refused: NonFinitePolicy | None = None
    is_working: bool = False
    has_gone_back: bool = False
    found: FoundValue | None = None
    runs: list[Run] = dataclasses.field(default_factory=list)
    kept: list[do.KeptHere] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)
    late: StepTimeoutError | None = None
    _entries: tuple[Asked, ...] = ()
    _replies: dict[int, dict[int, StepReply | None]] = dataclasses.field(default_factory=dict)
    _waiting: set[tuple[Asked, int]] = dataclasses.field(default_factory=set)
    _has_failed: bool = False

    @property
    def has_repeated(self) -> bool:
        """Whether groups have answered all that they were asked again."""
        return not self._waiting

    @property
    def is_over(self) -> bool:
        """Whether the steps were repeated, or there was nothing to repeat."""
        return not self.is_working or len(self.runs) == 2

    def begin(self, journal: Journal) -> Actions:
        """All is quiet. Without steps since the snapshot, there is nothing to repeat."""
        self._entries = journal.repeatable
        self._replies = {
            entry.ordinal: entry.replies
            for entry in self._entries
            if isinstance(entry, LoggedStep) and entry.replies
        }
        self.is_working = any(isinstance(entry, LoggedStep) for entry in self._entries)
        return [do.TakeDigests(self.number)] if self.is_working else []

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
        """Keeps the answer of a group to a repeated request.

        Raises: ``ResultChangedError`` when the group cannot read values from storage again.
        """
        entry, mpmd_idx, error = repeated.request, repeated.mpmd_idx, repeated.error
        if isinstance(error, GroupDiedError):
            return  # the death itself is noted
        self._waiting.discard((entry, mpmd_idx))
        self._has_failed |= error is not None
        if isinstance(error, StepTimeoutError):
            self.late = self.late or error
        if not isinstance(entry, LoggedStep):
            if error is not None and entry.answers[mpmd_idx] is not None:
                raise ResultChangedError(entry, mpmd_idx, error)
            return
        if entry.ordinal in self.runs[0].replies:
            reply = repeated.result if error is None else None
            self._replies.setdefault(entry.ordinal, {})[mpmd_idx] = reply
        is_first = self.found is None or entry.ordinal < self.found.step
        if isinstance(error, NonFiniteError) and (captured := sent_with(error).captured) is not None:
            program = entry.steps[mpmd_idx].program
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
        return [] if self.is_over else [do.GoBack(self.number, snapshot)]

    def adopt(self) -> None:
        """Logs the replies of the repeated run: groups keep its values, which differ from the first run's."""
        for entry in self._entries:
            if isinstance(entry, LoggedStep):
                entry.adopt(self.runs[-1].replies.get(entry.ordinal, {}))

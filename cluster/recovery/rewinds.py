"""The rewinds that are asked for, and their ends: groups go back with nobody dead, and repeat their steps.

They do so every ``Recovery.verify_every`` steps to notice wrong bits, and when the user searches for the
first NaN. ``Rewinds.carry_out`` has them do it. Afterwards groups have the values of the repeated run, which
are the same bits unless wrong bits are reported. The driver compares the answers of the repeated run, and
gives them to nobody.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.driver.calls.pending_calls import copy_of
from cluster.recovery.background import Background
from cluster.recovery.comparison import Replies, StepsRun, compare
from cluster.recovery.copies import Copies, CopiesLostError
from cluster.recovery.journal import changed_result
from cluster.recovery.ledger import Ledger
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.policy import Recovery
from cluster.recovery.report import CorruptionReport, FoundValue
from mpmd.errors import GroupDiedError, NonFiniteError, StepTimeoutError
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import Captured, Released, StepReply, sent_with
from mpmd.runtime.survey import take_digests

Answers = Mapping[tuple[Asked, int], Future]


class KeptHere(NamedTuple):
    """A task that a group has kept, because it has made a value that was refused."""

    step: int
    program: int
    captured: Captured
    error: BaseException


class Rewound(NamedTuple):
    """The result of a rewind.

    Attributes:
      runs: the ordinary run of the steps and the repeated run; empty if a step was late.
      found: the first value that was refused.
      kept: the tasks that groups have kept, also the task that made ``found``.
      damaged: texts about copies of the snapshot that have changed.
      late: the error of a repeated step that took too long.
      is_interrupted: groups have gone back for another reason, so that nothing is known.
    """

    runs: tuple[StepsRun, ...] = ()
    found: FoundValue | None = None
    kept: Sequence[KeptHere] = ()
    damaged: Sequence[str] = ()
    late: StepTimeoutError | None = None
    is_interrupted: bool = False


NOTHING = Rewound()


@dataclasses.dataclass(frozen=True)
class RewindRequest:
    """Groups are to go back to the last snapshot and repeat the steps since.

    Attributes:
      refused: the values that are errors meanwhile; ``None``: runs are compared.
      ended: the caller's future; ``None`` for a check, for which nobody waits.
    """

    refused: NonFinitePolicy | None = None
    ended: Future[Rewound] | None = None


class Rewinds:
    """The rewind that is to begin, or is under way, of which there is one at a time.

    Args:
      ledger: the requests to groups; its lock guards all attributes.
      policy: when to have groups repeat their steps.
      on_corruption: is called with a report of wrong bits.
      background: has a line on stderr for each report.

    Attributes:
      asked: the rewind, for the user or for a check.
      count: the number of rewinds so far.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: Recovery,
        on_corruption: Callable[[CorruptionReport], None],
        background: Background,
    ):
        self.asked: RewindRequest | None = None
        self.count = 0
        self._ledger = ledger
        self._policy = policy
        self._on_corruption = on_corruption
        self._background = background
        self._verified = 0  # the steps that were asked before the last check

    def note_step(self) -> None:
        is_due = self._policy.check_is_due(self._ledger.journal, self._verified)
        if is_due and self.asked is None and not self._ledger.awaits_checkpoint:
            self.ask(RewindRequest())

    def ask(self, request: RewindRequest) -> None:
        assert self.asked is None, "groups go back for one reason at a time"
        self.asked = request
        self.count += 1
        self._ledger.notify()

    def find(self, refused: NonFinitePolicy) -> Rewound:
        """Has groups go back and repeat their steps with nobody dead, and waits for the end.

        Returns: the first value that was refused, and the tasks that groups have kept until they are freed.
        Raises: why nothing works any more; ``StepTimeoutError`` when a repeated step took too long.
        """
        ledger = self._ledger
        with ledger.changed:
            while True:
                ledger.wait_for(lambda: ledger.is_running and not ledger.awaits_checkpoint)
                ended: Future[Rewound] = Future()
                self.ask(RewindRequest(refused, ended))
                try:
                    ledger.wait_for(ended.done)
                except BaseException:
                    if not ended.cancel():  # it has ended, and this caller does not look at it
                        self._drop_kept(ended.result())
                    raise
                rewound = ended.result()
                if not rewound.is_interrupted:
                    return rewound
                self._drop_kept(rewound)
                if rewound.late is not None:
                    raise copy_of(rewound.late)

    def carry_out(self, request: RewindRequest, entries: Sequence[Asked], copies: Copies) -> Rewound:
        """Has all groups, which have answered all requests, go back to a snapshot and repeat ``entries``.

        When a value was refused, groups have stopped in the middle, and go back and repeat the steps once
        more.

        Args:
          entries: the steps and reads since the snapshot.

        Raises: ``CopiesLostError`` when no group has gone back; ``RecoveryError`` when a group cannot
          read values from storage again; any other error when groups are somewhere in the middle.
        """
        ledger, snapshot = self._ledger, self._ledger.journal.committed
        steps = [entry for entry in entries if isinstance(entry, LoggedStep)]
        replies = {step.ordinal: step.replies for step in steps if step.replies}
        ordinary = StepsRun(replies, take_digests(ledger.groups, ledger.logged))
        damaged = list(copies.go_back(snapshot))
        answers = ledger.repeat(entries, request.refused)
        errors = _errors_of(answers)
        found, kept = _refused(errors)
        if errors and request.refused is not None and _late(errors) is None:
            try:
                damaged += copies.go_back(snapshot)
            except CopiesLostError as lost:
                raise RuntimeError(str(lost)) from lost
            answers = ledger.repeat(entries, None)
            errors = _errors_of(answers)
        if (late := _late(errors)) is not None:
            return Rewound((), found, kept, damaged, late)
        repeated = StepsRun(_replies(answers, errors, replies), take_digests(ledger.groups, ledger.logged))
        return Rewound((ordinary, repeated), found, kept, damaged)

    def report(self, report: CorruptionReport) -> None:
        self._on_corruption(report)
        self._background.say(report)

    def compare(self, entries: Sequence[Asked], rewound: Rewound) -> CorruptionReport | None:
        """Compares the two runs of the steps. Reports wrong bits, and returns the first difference."""
        for text in dict.fromkeys(rewound.damaged):
            self.report(CorruptionReport.of_copies(text))
        ordinary, repeated = rewound.runs
        found = compare(ordinary, repeated)
        if found is not None:
            self.report(found)
            for step in (entry for entry in entries if isinstance(entry, LoggedStep)):
                step.adopt(repeated.replies.get(step.ordinal, {}))
        return found

    def interrupt(self, rewound: Rewound = NOTHING) -> None:
        """Groups go back for another reason, or a repeated step was late. The next check is due as usual."""
        if rewound.late is not None:
            self._verified = self._ledger.journal.num_asked
        self._end(rewound._replace(is_interrupted=True))

    def settle(self, rewound: Rewound) -> None:
        self._verified = self._ledger.journal.num_asked
        self._end(rewound)

    def _end(self, rewound: Rewound) -> None:
        """Hands the result to the caller; if the caller is gone, has groups drop the kept tasks."""
        request, self.asked = self.asked, None
        if request is None:
            return
        self._ledger.changed.notify_all()
        if request.ended is not None and request.ended.set_running_or_notify_cancel():
            request.ended.set_result(rewound)
        else:
            self._drop_kept(rewound)

    def _drop_kept(self, rewound: Rewound) -> None:
        for kept in (each.captured for each in rewound.kept):
            self._ledger.releases.give_back({kept.mpmd_idx: Released((kept.capture.handle,))})


def _errors_of(answers: Answers) -> dict[tuple[Asked, int], BaseException]:
    """Waits for all answers, and returns the errors among them."""
    concurrent.futures.wait(answers.values())
    errors = {key: error for key, each in answers.items() if (error := each.exception()) is not None}
    for (entry, mpmd_idx), error in errors.items():
        if isinstance(error, GroupDiedError):
            raise error
        if not isinstance(entry, LoggedStep) and entry.answers[mpmd_idx] is not None:
            raise changed_result(entry, mpmd_idx, error)
    return errors


def _late(errors: Mapping[tuple[Asked, int], BaseException]) -> StepTimeoutError | None:
    return next((error for error in errors.values() if isinstance(error, StepTimeoutError)), None)


def _refused(
    errors: Mapping[tuple[Asked, int], BaseException],
) -> tuple[FoundValue | None, tuple[KeptHere, ...]]:
    refused = [
        (entry, mpmd_idx, error)
        for (entry, mpmd_idx), error in errors.items()
        if isinstance(entry, LoggedStep) and isinstance(error, NonFiniteError)
    ]
    kept = tuple(
        KeptHere(step.ordinal, step.steps[mpmd_idx].program, captured, error)
        for step, mpmd_idx, error in refused
        if (captured := sent_with(error).captured) is not None
    )
    if not refused:
        return None, kept
    step, _, error = min(refused, key=lambda each: each[0].ordinal)
    return FoundValue(step.ordinal, error.label, error.mpmd_idx, str(error)), kept


def _replies(
    answers: Answers, errors: Mapping[tuple[Asked, int], BaseException], compared: Collection[int]
) -> Replies:
    """The replies to the steps with the ordinals ``compared``; ``None`` for a reply that is an error."""
    replies: dict[int, dict[int, StepReply | None]] = {}
    for (entry, mpmd_idx), answer in answers.items():
        if isinstance(entry, LoggedStep) and entry.ordinal in compared:
            reply = None if (entry, mpmd_idx) in errors else answer.result()
            replies.setdefault(entry.ordinal, {})[mpmd_idx] = reply
    return replies

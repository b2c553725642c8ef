"""Decisions about groups that go back with nobody dead: a part of the state machine of ``membership``.

They go back every ``Recovery.verify_every`` steps to notice wrong bits, and when the user searches for the
first NaN. ``procedures.rewind`` has them do it. Afterwards groups have the values of the repeated run, which
are the same bits unless wrong bits are reported. The driver compares the answers of the repeated run, and
gives them to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions
from cluster.recovery.comparison import Run, compare
from cluster.recovery.events import RewindAsked
from cluster.recovery.journal import Journal
from cluster.recovery.logged import LoggedStep
from cluster.recovery.policy import REPLACE, WARN, Recovery
from cluster.recovery.report import COMPUTED, CorruptionReport, FoundValue
from mpmd.errors import SilentCorruptionError, StepTimeoutError


class Rewound(NamedTuple):
    """The result of a rewind.

    Attributes:
      runs: the ordinary run of the steps and the repeated run; empty if a step was late.
      found: the first value that was refused.
      kept: the tasks that groups have kept, because they have made a refused value.
      damaged: texts about copies of the snapshot that have changed.
      late: the error of a repeated step that took too long.
    """

    runs: tuple[Run, ...] = ()
    found: FoundValue | None = None
    kept: Sequence[do.KeptHere] = ()
    damaged: Sequence[str] = ()
    late: StepTimeoutError | None = None


class Verdict(NamedTuple):
    """The consequences of the comparison of two runs.

    Attributes:
      reports: of wrong bits.
      faulty: the groups that are to be replaced.
      error: ends the run.
    """

    reports: Actions
    faulty: Sequence[int] = ()
    error: SilentCorruptionError | None = None


class Rewinds:
    """The rewind under way, of which there is one at a time.

    Args:
      journal: the requests to groups.
      policy: when to have groups repeat their steps, and the reaction to wrong bits.

    Attributes:
      asked: the rewind that is to begin, or is under way.
      count: the number of rewinds so far.
    """

    def __init__(self, journal: Journal, policy: Recovery):
        self._journal = journal
        self._policy = policy
        self.count = 0
        self.asked: RewindAsked | None = None
        self._check_is_due = False
        self._verified = 0  # the steps that were asked before the last check

    @property
    def is_wanted(self) -> bool:
        """Whether groups are to go back, for the user or for a check."""
        return self.asked is not None or self._check_is_due

    @property
    def is_due(self) -> bool:
        """Whether groups are to repeat their steps now, after a step."""
        return self._policy.check_is_due(self._journal, self._verified)

    def ask(self, asked: RewindAsked | None = None) -> None:
        """Groups are to go back when they have answered all; ``None`` for a check, which nobody waits for."""
        self.count += 1
        self.asked, self._check_is_due = asked, True

    def begin(self) -> do.Rewind | None:
        """Begins when groups have answered all. ``None``: no step was run since the snapshot."""
        entries = self._journal.repeatable
        steps = [entry for entry in entries if isinstance(entry, LoggedStep)]
        if not steps:
            return None
        replies = {step.ordinal: step.replies for step in steps if step.replies}
        refused = None if self.asked is None else self.asked.refused
        return do.Rewind(self._journal.committed, entries, replies, refused)

    def interrupt(self, rewound: Rewound | None = None) -> Actions:
        """Groups go back for another reason, or a repeated step was late. The next check is due as usual."""
        if not self.is_wanted:
            return []
        if rewound is None:
            return [self._end(is_interrupted=True)]
        if rewound.late is not None:
            self._verified = self._journal.num_asked
        return [self._end(kept=rewound.kept, is_interrupted=True, late=rewound.late)]

    def settle(self, rewound: Rewound | None = None) -> Actions:
        """Groups have their values from before the rewind; ``None``: there was no step to repeat."""
        if rewound is None:
            return [self._end()]
        self._verified = self._journal.num_asked
        return [self._end(found=rewound.found, kept=rewound.kept)]

    def _end(self, **result: object) -> do.EndRewind:
        number = None if self.asked is None else self.asked.number
        self.asked, self._check_is_due = None, False
        return do.EndRewind(number, **result)  # type: ignore[arg-type]

    def judge(self, job: do.Rewind, rewound: Rewound) -> Verdict:
        """Compares the two runs of the steps."""
        texts = dict.fromkeys(rewound.damaged)
        reports: Actions = [do.ReportCorruption(CorruptionReport.of_copies(text)) for text in texts]
        ordinary, repeated = rewound.runs
        found = compare(ordinary, repeated)
        if found is None:
            return Verdict(reports)
        reports.append(do.ReportCorruption(found))
        for step in (entry for entry in job.entries if isinstance(entry, LoggedStep)):
            step.adopt(repeated.replies.get(step.ordinal, {}))
        if self._policy.on_corruption == WARN:
            return Verdict(reports)
        if self._policy.on_corruption == REPLACE and found.kind == COMPUTED:
            return Verdict(reports, found.mpmd_idxs)
        remedy = _UNKNOWN if self._policy.on_corruption == REPLACE else ""
        return Verdict(reports, error=SilentCorruptionError(f"{found}{remedy}", found.mpmd_idxs))


_UNKNOWN = (
    '. on_corruption="replace" replaces no group, because it cannot be told which one is wrong. '
    "Start again from a checkpoint"
)

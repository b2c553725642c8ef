"""Decisions about groups that go back with nobody dead: a part of the state machine of ``membership``.

They go back every ``Recovery.verify_every`` steps to notice wrong bits, and when the user searches for the
first NaN. ``procedures.rewind`` has them do it. Afterwards groups have the values of the repeated run, which
are the same bits unless wrong bits are reported. The driver compares the answers of the repeated run, and
gives them to nobody.
"""

from __future__ import annotations

from cluster.recovery import actions as do
from cluster.recovery.actions import Actions, Rewound
from cluster.recovery.comparison import compare
from cluster.recovery.events import RewindAsked
from cluster.recovery.journal import Journal
from cluster.recovery.logged import LoggedStep
from cluster.recovery.policy import Recovery
from cluster.recovery.report import CorruptionReport

NOTHING = Rewound()


class Rewinds:
    """The rewind under way, of which there is one at a time.

    Args:
      journal: the requests to groups.
      policy: when to have groups repeat their steps.

    Attributes:
      asked: the rewind that is to begin, or is under way, for the user or for a check.
      count: the number of rewinds so far.
    """

    def __init__(self, journal: Journal, policy: Recovery):
        self._journal = journal
        self._policy = policy
        self.count = 0
        self.asked: RewindAsked | None = None
        self._verified = 0  # the steps that were asked before the last check

    @property
    def is_due(self) -> bool:
        return self._policy.check_is_due(self._journal, self._verified)

    def ask(self, asked: RewindAsked) -> None:
        """Groups are to go back when they have answered all."""
        self.count += 1
        self.asked = asked

    def begin(self) -> do.Rewind | None:
        """Begins when groups have answered all. ``None``: no step was run since the snapshot."""
        assert self.asked is not None, "no rewind is wanted"
        entries = self._journal.repeatable
        steps = [entry for entry in entries if isinstance(entry, LoggedStep)]
        if not steps:
            return None
        replies = {step.ordinal: step.replies for step in steps if step.replies}
        return do.Rewind(self._journal.committed, entries, replies, self.asked.refused)

    def interrupt(self, rewound: Rewound = NOTHING) -> Actions:
        """Groups go back for another reason, or a repeated step was late. The next check is due as usual."""
        if self.asked is None:
            return []
        if rewound.late is not None:
            self._verified = self._journal.num_asked
        return self._end(rewound, is_interrupted=True)

    def settle(self, rewound: Rewound | None = None) -> Actions:
        """Groups have their values from before the rewind; ``None``: there was no step to repeat."""
        if rewound is None:
            return self._end(NOTHING)
        self._verified = self._journal.num_asked
        return self._end(rewound)

    def _end(self, rewound: Rewound, is_interrupted: bool = False) -> Actions:
        ended = None if self.asked is None else self.asked.ended
        self.asked = None
        return [do.EndRewind(ended, rewound, is_interrupted)]

    def compare(self, job: do.Rewind, rewound: Rewound) -> tuple[Actions, CorruptionReport | None]:
        """Compares the two runs of the steps. Reports wrong bits, and a difference."""
        texts = dict.fromkeys(rewound.damaged)
        reports: Actions = [do.ReportCorruption(CorruptionReport.of_copies(text)) for text in texts]
        ordinary, repeated = rewound.runs
        found = compare(ordinary, repeated)
        if found is not None:
            reports.append(do.ReportCorruption(found))
            for step in (entry for entry in job.entries if isinstance(entry, LoggedStep)):
                step.adopt(repeated.replies.get(step.ordinal, {}))
        return reports, found

"""The actions that follow from the events of membership, as frozen values.

The shell carries out an ``Action`` at once, and a ``Job``, which may block, in a thread; the end of a job is
an event. Jobs that follow from one event are carried out one after the other, also after a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.recovery.comparison import Replies, StepsRun
from cluster.recovery.journal import Outcome
from cluster.recovery.logged import Asked, Logged, LoggedSnapshot
from cluster.recovery.report import CorruptionReport, FoundValue, Phases, RecoveryReport
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, StepTimeoutError
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import Captured


@dataclasses.dataclass(frozen=True)
class Action:
    """A consequence of an event."""


class Job(Action):
    """An action that may block."""


@dataclasses.dataclass(frozen=True)
class Tell(Action):
    outcomes: Sequence[Outcome]


@dataclasses.dataclass(frozen=True)
class Attach(Action):
    """From now on groups are asked over these connections, and their deaths are noted."""

    connections: Sequence[Connection]


@dataclasses.dataclass(frozen=True)
class Disconnect(Action):
    """Nobody needs these connections."""

    connections: Sequence[Connection]


@dataclasses.dataclass(frozen=True)
class LoseValues(Action):
    """These groups have no value any more: requests for values from before fail so, now and later."""

    errors: Mapping[int, RuntimeError]


@dataclasses.dataclass(frozen=True)
class ReplayLog(Action):
    """Asks groups, in order, for requests and snapshots that are logged."""

    entries: Sequence[Logged]


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
    """

    runs: tuple[StepsRun, ...] = ()
    found: FoundValue | None = None
    kept: Sequence[KeptHere] = ()
    damaged: Sequence[str] = ()
    late: StepTimeoutError | None = None


@dataclasses.dataclass(frozen=True)
class EndRewind(Action):
    """Hands the result of a rewind to its caller.

    Attributes:
      ended: the caller's future of this action; ``None`` for a check, for which nobody waits.
      is_interrupted: groups have gone back for another reason, so that nothing is known.
    """

    ended: Future[EndRewind] | None
    rewound: Rewound
    is_interrupted: bool


@dataclasses.dataclass(frozen=True)
class ReportCorruption(Action):
    """Tells the user of wrong bits."""

    report: CorruptionReport


class BeginSnapshot(Action):
    """Has all groups copy their values."""


class MarkCommitted(Action):
    """The copies of the last snapshot are those to go back to."""


@dataclasses.dataclass(frozen=True)
class GiveBack(Action):
    """Groups were not told to drop the values that a snapshot was to drop."""

    snapshot: LoggedSnapshot


@dataclasses.dataclass(frozen=True)
class Say(Action):
    message: str


@dataclasses.dataclass(frozen=True)
class End(Action):
    """Fails all that is asked, now and later."""

    error: RuntimeError


# Jobs that replace groups, or have groups go back. One of them is under way at a time.


@dataclasses.dataclass(frozen=True)
class Detach(Job):
    """Fails all calls on groups, now and until ``Attach``. Later deaths are found by ``Recover``."""

    reason: GroupDiedError


@dataclasses.dataclass(frozen=True)
class Recover(Job):
    """Replaces the processes of groups and has all groups go back, by ``procedures.recover``.

    Attributes:
      dead: the groups whose processes are replaced now.
      replaced: all groups with new processes that have not loaded their programs yet, ``dead`` among them.
      snapshot: number of the snapshot to go back to.
    """

    dead: frozenset[int]
    replaced: frozenset[int]
    snapshot: int
    phases: Phases = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class GoBack(Job):
    """Has all groups go back to a snapshot, with nobody dead, by ``procedures.go_back``."""

    snapshot: int
    phases: Phases = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Rewind(Job):
    """Has all groups go back to a snapshot and repeat steps, with nobody dead, by ``procedures.rewind``.

    Attributes:
      entries: the steps and reads since the snapshot.
      replies: the replies of the groups in the ordinary run.
      refused: the values that are errors in the repeated run; ``None``: the steps are repeated as they were.
    """

    snapshot: int
    entries: Sequence[Asked]
    replies: Replies
    refused: NonFinitePolicy | None


@dataclasses.dataclass(frozen=True)
class ReportRecovery(Job):
    """Tells the user of a replacement after its replay. Ends ``phases``, whose seconds the report has."""

    report: RecoveryReport
    phases: Phases = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class StartSpares(Job):
    """Starts missing spares, and gives back what nobody uses. ``ends_move``: the move under way."""

    ends_move: bool = False


# Jobs that look after the places of groups.


class Look(Job):
    """Finds the groups that are to move. Its result are these and why: ``drained``, ``shrunk``, ``grown``."""


@dataclasses.dataclass(frozen=True)
class Prepare(Job):
    """Has processes ready for a group that moves, while steps run.

    Its result are the groups of which a process does not answer; ``None`` if there is no place to move to.
    """

    mpmd_idx: int
    kind: str
    phases: Phases = dataclasses.field(compare=False)


class Discard(Job):
    """Ends processes that were prepared and not used."""


# Jobs of snapshots.


@dataclasses.dataclass(frozen=True)
class CopyAway(Job):
    """Waits for the copies of a snapshot, and has them travel to where they outlive their group."""

    attempt: int
    snapshot: LoggedSnapshot
    base: int
    copied: Sequence[Future]


@dataclasses.dataclass(frozen=True)
class AwaitDeath(Job):
    """Waits to hear of a death that explains a failed snapshot without which the run cannot go on.

    Ends at once when the processes of all groups answer.
    """

    copying: CopyAway
    error: BaseException


# Other jobs.


class AwaitCheckpoints(Job):
    """Gives checkpoints that are being saved some time before a group leaves a node that is to end."""


class ReleaseAll(Job):
    """Ends all processes, and gives all resources back."""


Actions = list[Action]

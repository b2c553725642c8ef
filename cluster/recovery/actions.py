"""The actions that follow from the events of membership, as frozen values.

The shell carries out an ``Action`` at once, and a ``Job``, which may block, in a thread; it reports the end
of jobs. Actions that follow from one event are carried out in order; a fault drops the remaining actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.recovery.journal import Outcome
from cluster.recovery.logged import Asked, Logged, LoggedSnapshot, LoggedStep
from cluster.recovery.report import CorruptionReport, FoundValue
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, StateLostError, StepTimeoutError
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import Captured


@dataclasses.dataclass(frozen=True)
class Action:
    """A consequence of an event."""


class Job(Action):
    """An action that may block."""


class Wait(Job):
    """A job that ends when ``Membership.is_over`` says so."""


@dataclasses.dataclass(frozen=True)
class Tell(Action):
    """Settles futures of the user's."""

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
    """No group has a value any more: requests for values from before fail with ``error``, now and later."""

    error: StateLostError


@dataclasses.dataclass(frozen=True)
class ForgetValues(Action):
    """Recovery leaves these groups out, and they were restarted: their values from before are lost."""

    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Replay(Action):
    """Asks groups once more, in order."""

    entries: Sequence[Logged]


@dataclasses.dataclass(frozen=True)
class Repeat(Action):
    """Asks groups once more, in order, for answers that only the rewind with this number gets."""

    number: int
    entries: Sequence[Asked]
    refused: NonFinitePolicy | None


class KeptHere(NamedTuple):
    """A task that a group has kept, because it has made a value that was refused."""

    step: int
    program: int
    captured: Captured
    error: BaseException


@dataclasses.dataclass(frozen=True)
class EndRewind(Action):
    """Settles the rewind with this number.

    Attributes:
      found: the first value that was refused.
      kept: the tasks that groups have kept, also the task that made ``found``.
      is_interrupted: groups have gone back for another reason, so that nothing is known.
      late: that reason, where a repeated step took too long.
    """

    number: int
    found: FoundValue | None = None
    kept: Sequence[KeptHere] = ()
    is_interrupted: bool = False
    late: StepTimeoutError | None = None


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
    """Tells the user."""

    message: str


@dataclasses.dataclass(frozen=True)
class End(Action):
    """Fails all that is asked, now and later."""

    error: RuntimeError


# Jobs of a replacement, in order.


class AwaitLeftOut(Wait):
    """Waits until every request that is not logged is answered."""


class ReplacementJob(Job):
    """A job of a replacement."""


@dataclasses.dataclass(frozen=True)
class _OfGroups(ReplacementJob):
    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _OfSnapshot(ReplacementJob):
    snapshot: int


@dataclasses.dataclass(frozen=True)
class Detach(ReplacementJob):
    """Fails all calls on groups, now and until ``Attach``."""

    reason: GroupDiedError


class Kill(_OfGroups):
    """Ends the processes of groups."""


@dataclasses.dataclass(frozen=True)
class Reset(ReplacementJob):
    """Has all groups but these end their connections as soon as no step runs. Does not wait for them."""

    but: frozenset[int]


class Start(_OfGroups):
    """Starts processes for groups whose own have ended. May wait for room."""


class Open(_OfGroups):
    """Has new processes of groups take their devices. A death of another one is reported as ``Lost``."""


class AwaitReset(ReplacementJob):
    """Waits for the end of ``Reset``."""


class CheckCopies(_OfSnapshot):
    """Finds damaged copies of a snapshot. Raises ``CopiesLostError`` when no good ones are left."""


class Connect(ReplacementJob):
    """Connects all processes with one another."""


class Load(_OfGroups):
    """Has groups load all programs."""


class Restore(_OfSnapshot):
    """Has all groups go back to a snapshot."""


class ConnectDriver(ReplacementJob):
    """Connects the driver with all processes. Its result are the connections."""


@dataclasses.dataclass(frozen=True)
class Recovered:
    """A replacement, as ``RecoveryReport`` has it; and the attempt and the steps of the replay after it."""

    groups: frozenset[int]
    death: GroupDiedError
    step: LoggedStep | None
    kind: str
    lost: str | None
    attempt: int
    steps: Sequence[LoggedStep]


@dataclasses.dataclass(frozen=True)
class AwaitReplay(Wait):
    """Waits until all steps of a replay are answered, or groups go back once more."""

    recovered: Recovered


@dataclasses.dataclass(frozen=True)
class Report(Job):
    """Tells the user of a replacement."""

    recovered: Recovered


@dataclasses.dataclass(frozen=True)
class StartSpares(Job):
    """Starts missing spares, and gives back what nobody uses. ``ends_move``: the move under way."""

    ends_move: bool = False


# Jobs of a move, in order.


class MoveJob(Job):
    """A job of a move."""


class Look(Job):
    """Finds the groups that are to move. Its result are these and why: ``drained``, ``shrunk``, ``grown``."""


@dataclasses.dataclass(frozen=True)
class Prepare(MoveJob):
    """Has processes ready for a group that moves for a reason. Its result is whether there is a place."""

    mpmd_idx: int
    kind: str


class AwaitRunning(MoveJob, Wait):
    """Waits until no group is being replaced."""


class AwaitSaves(MoveJob, Wait):
    """Waits until no checkpoint is being saved, for some seconds."""


@dataclasses.dataclass(frozen=True)
class FindDead(MoveJob):
    """Finds groups of which a process is gone or does not answer. Its result are these.

    ``failed``: the snapshot without which the run cannot go on, unless a death is why, and the reason.
    """

    failed: tuple[CopyAway, BaseException] | None = None


class AwaitSnapshot(MoveJob, Wait):
    """Waits until no snapshot is under way that will count soon, or a group has died."""


class Discard(MoveJob):
    """Ends processes that were prepared and not used."""


# Jobs of a rewind, in order. No group is dead meanwhile.


@dataclasses.dataclass(frozen=True)
class RewindJob(Job):
    """A job of the rewind with this number."""

    number: int


class AwaitAnswers(RewindJob, Wait):
    """Waits until groups have answered all that they were asked."""


class TakeDigests(RewindJob):
    """Has all groups make digests of their values. Its result: ``ProcessDigests`` of all processes."""


@dataclasses.dataclass(frozen=True)
class GoBack(RewindJob):
    """Has all groups go back to a snapshot.

    Its result says which copies have changed. Raises ``CopiesLostError`` when no good ones are left: then no
    group has gone back.
    """

    snapshot: int


class AwaitRepeated(RewindJob, Wait):
    """Waits until groups have answered ``Repeat``, or one has died."""


# Other jobs.


@dataclasses.dataclass(frozen=True)
class CopyAway(Job):
    """Waits for the copies of a snapshot, and has them travel to where they outlive their group."""

    attempt: int
    snapshot: LoggedSnapshot
    base: int
    copied: Sequence[Future]


@dataclasses.dataclass(frozen=True)
class AwaitDeath(Wait):
    """Waits until the death is reported that made a snapshot fail, for some seconds. As ``FindDead``."""

    failed: tuple[CopyAway, BaseException]


class Release(Job):
    """Ends all processes, and gives all resources back."""


Actions = list[Action]

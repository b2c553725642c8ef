"""The actions that follow from the events of membership, as frozen values.

An ``Action`` is carried out at once. A ``Job`` may block: the shell carries it out in a thread, and reports
its end. Jobs that follow from one event are carried out one after the other; a fault drops those behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.recovery.journal import Outcome
from cluster.recovery.logged import Logged, LoggedSnapshot, LoggedStep
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, StateLostError


@dataclasses.dataclass(frozen=True)
class Tell:
    """Settles futures of the user's."""

    outcomes: Sequence[Outcome]


@dataclasses.dataclass(frozen=True)
class Attach:
    """From now on groups are asked over these connections, and their deaths are noted."""

    connections: Sequence[Connection]


@dataclasses.dataclass(frozen=True)
class Disconnect:
    """Nobody needs these connections."""

    connections: Sequence[Connection]


@dataclasses.dataclass(frozen=True)
class LoseValues:
    """No group has a value any more: what comes from before fails with this error, now and later."""

    error: StateLostError


@dataclasses.dataclass(frozen=True)
class Replay:
    """Asks groups once more, in order."""

    entries: Sequence[Logged]


@dataclasses.dataclass(frozen=True)
class BeginSnapshot:
    """Has all groups copy their values."""


@dataclasses.dataclass(frozen=True)
class MarkCommitted:
    """The copies of the last snapshot are those to go back to."""


@dataclasses.dataclass(frozen=True)
class GiveBack:
    """Groups were not told to drop the values that a snapshot was to drop."""

    snapshot: LoggedSnapshot


@dataclasses.dataclass(frozen=True)
class Say:
    """Tells the user."""

    message: str


@dataclasses.dataclass(frozen=True)
class End:
    """Fails all that is asked, now and later."""

    error: RuntimeError


Action = (
    Tell | Attach | Disconnect | LoseValues | Replay | BeginSnapshot | MarkCommitted | GiveBack | Say | End
)


# Jobs of a replacement, in order.


@dataclasses.dataclass(frozen=True)
class Detach:
    """Fails all calls on groups, now and until ``Attach``."""

    reason: GroupDiedError


@dataclasses.dataclass(frozen=True)
class Kill:
    """Ends the processes of groups."""

    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Reset:
    """Has all groups but these end their connections as soon as no step runs. Does not wait for them."""

    but: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Start:
    """Starts processes for groups whose own have ended. May wait for room."""

    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Open:
    """Has new processes of groups take their devices. A death of another one is reported as ``Lost``."""

    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class AwaitReset:
    """Waits for the end of ``Reset``."""


@dataclasses.dataclass(frozen=True)
class CheckCopies:
    """Finds damaged copies of a snapshot. Raises ``CopiesLostError`` when no good ones are left."""

    snapshot: int


@dataclasses.dataclass(frozen=True)
class Connect:
    """Connects all processes with one another."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Has groups load all programs."""

    groups: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Restore:
    """Has all groups go back to a snapshot."""

    snapshot: int


@dataclasses.dataclass(frozen=True)
class ConnectDriver:
    """Connects the driver with all processes. Its result are the connections."""


ReplacementJob = (
    Detach | Kill | Reset | Start | Open | AwaitReset | CheckCopies | Connect | Load | Restore | ConnectDriver
)


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
class AwaitReplay:
    """Waits until all steps of a replay are answered, or groups go back once more."""

    recovered: Recovered


@dataclasses.dataclass(frozen=True)
class Report:
    """Tells the user of a replacement."""

    recovered: Recovered


@dataclasses.dataclass(frozen=True)
class StartSpares:
    """Starts missing spares, and gives back what nobody uses. ``ends_move``: the move under way."""

    ends_move: bool = False


# Jobs of a move, in order.


@dataclasses.dataclass(frozen=True)
class Look:
    """Finds the groups that are to move. Its result are these and why: ``drained``, ``shrunk``, ``grown``."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Has processes ready for a group at another place. Its result is whether there is one."""

    mpmd_idx: int
    may_use_spares: bool


@dataclasses.dataclass(frozen=True)
class AwaitRunning:
    """Waits until no group is being replaced."""


@dataclasses.dataclass(frozen=True)
class AwaitSaves:
    """Waits until no checkpoint is being saved, for some seconds."""


@dataclasses.dataclass(frozen=True)
class FindDead:
    """Finds groups of which a process is gone or does not answer. Its result are these.

    ``failed``: the snapshot without which the run cannot go on, unless a death is why, and the reason.
    """

    failed: tuple[CopyAway, BaseException] | None = None


@dataclasses.dataclass(frozen=True)
class AwaitSnapshot:
    """Waits until no snapshot is under way that will count soon, or a group has died."""


@dataclasses.dataclass(frozen=True)
class Discard:
    """Ends processes that were prepared and not used."""


MoveJob = Prepare | AwaitRunning | AwaitSaves | FindDead | AwaitSnapshot | Discard


# Other jobs.


@dataclasses.dataclass(frozen=True)
class CopyAway:
    """Waits for the copies of a snapshot, and has them travel to where they outlive their group."""

    attempt: int
    snapshot: LoggedSnapshot
    base: int
    copied: Sequence[Future]


@dataclasses.dataclass(frozen=True)
class AwaitDeath:
    """Waits until the death is reported that made a snapshot fail, for some seconds. As ``FindDead``."""

    failed: tuple[CopyAway, BaseException]


@dataclasses.dataclass(frozen=True)
class Release:
    """Ends all processes, and gives all resources back."""


StartingJob = Start | Open | Prepare | StartSpares
"""The jobs that start processes."""

Wait = AwaitReplay | AwaitRunning | AwaitSaves | AwaitSnapshot | AwaitDeath
"""The jobs that end when ``Membership.is_over`` says so."""

Job = ReplacementJob | Report | StartSpares | Look | Prepare | FindDead | Discard | CopyAway | Release | Wait

Actions = list[Action | Job]

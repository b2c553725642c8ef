"""The states of membership, and its events, which ``Membership.handle`` turns into ``actions``."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from cluster.recovery.actions import EndRewind, Job
from cluster.recovery.journal import Outcome
from cluster.recovery.logged import Asked, LoggedSnapshot
from mpmd.errors import GroupDiedError
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import Handle


class State(enum.Enum):
    """The state of all groups together.

    ``RUNNING``: groups are asked for what the user wants. ``QUIESCING``: new requests wait until groups have
    answered all others, which is where a rewind, a move, and going back for a failed step begin.
    ``RECOVERING``: groups are replaced or go back. ``ENDED``: nothing works any more.
    """

    RUNNING, QUIESCING, RECOVERING, ENDED = "running", "quiescing", "recovering", "ended"


@dataclasses.dataclass(frozen=True)
class Died:
    """A group counts as dead; ``error`` names it."""

    error: GroupDiedError


@dataclasses.dataclass(frozen=True)
class Answered:
    """A group has answered a request in an attempt of the journal's."""

    attempt: int
    outcome: Outcome


class StepAsked:
    """A step was asked of groups; a snapshot or a check may be due after it."""


@dataclasses.dataclass(frozen=True)
class RewindAsked:
    """Groups are to go back to the last snapshot and repeat the steps since.

    Attributes:
      ended: the caller's future; ``None`` for a check, for which nobody waits.
      refused: the values that are errors meanwhile; ``None``: runs are compared.
    """

    ended: Future[EndRewind] | None = None
    refused: NonFinitePolicy | None = None


@dataclasses.dataclass(frozen=True)
class Copying:
    """Groups were asked for the copies of a snapshot."""

    snapshot: LoggedSnapshot
    copied: Sequence[Future]


@dataclasses.dataclass(frozen=True)
class CopyAsked:
    """A group was asked for a copy that is to be written to storage."""

    copy: Handle


@dataclasses.dataclass(frozen=True)
class Unneeded:
    """These copies for storage, or all, need not be made again."""

    copies: frozenset[Handle] | None = None


@dataclasses.dataclass(frozen=True)
class Freed:
    """A copy for storage is written, or nobody will write it."""

    copy: Handle


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request that is not logged is sent to groups."""

    request: Asked


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The user wants dead groups replaced that recovery leaves out; or gives that up."""

    groups: frozenset[int]
    given_up: bool = False


@dataclasses.dataclass(frozen=True)
class Closed:
    """The mesh was closed, or cannot be looked after; ``error`` is for those who wait."""

    error: RuntimeError


@dataclasses.dataclass(frozen=True)
class Done:
    """A job has ended, with a result if it is one that has."""

    job: Job
    result: Any = None


@dataclasses.dataclass(frozen=True)
class Faulted:
    """A job has raised an error. ``by_death``: a death is why, which is reported by itself."""

    job: Job
    error: BaseException
    by_death: bool = False


Event = (
    Died
    | Answered
    | StepAsked
    | RewindAsked
    | Copying
    | CopyAsked
    | Unneeded
    | Freed
    | Sent
    | Wanted
    | Closed
    | Done
    | Faulted
)

"""The events of membership, as frozen values. ``Membership.handle`` turns them into ``actions``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from cluster.recovery.actions import Job
from cluster.recovery.logged import Asked, LoggedSnapshot
from mpmd.errors import GroupDiedError
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import Handle


@dataclasses.dataclass(frozen=True)
class Died:
    """A group counts as dead; ``error`` names it."""

    error: GroupDiedError


@dataclasses.dataclass(frozen=True)
class Answered:
    """A group has answered a request in an attempt of the journal's: by a result, or by an error."""

    attempt: int
    request: Asked
    mpmd_idx: int
    result: Any = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class RewindAsked:
    """Groups are to go back to the last snapshot and repeat the steps since; none is being replaced.

    Attributes:
      number: of the rewind; they ascend.
      refused: the values that are errors meanwhile; ``None``: runs are compared.
    """

    number: int
    refused: NonFinitePolicy | None = None


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A group has answered a request of a rewind, by a result or an error."""

    number: int
    request: Asked
    mpmd_idx: int
    result: Any = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class Unneeded:
    """These copies for storage, or all, need not be made again."""

    copies: frozenset[Handle] | None = None


@dataclasses.dataclass(frozen=True)
class Copying:
    """Groups were asked for the copies of a snapshot."""

    snapshot: LoggedSnapshot
    copied: Sequence[Future]


@dataclasses.dataclass(frozen=True)
class Lost:
    """A group has died while new processes of another group take their devices. See ``Faulted``."""

    mpmd_idx: int
    error: Exception
    node_is_gone: bool


@dataclasses.dataclass(frozen=True)
class Closed:
    """The mesh was closed; ``error`` is for those who wait."""

    error: RuntimeError


@dataclasses.dataclass(frozen=True)
class Done:
    """A job has ended, with a result if it is one that has."""

    job: Job
    result: Any = None


@dataclasses.dataclass(frozen=True)
class Faulted:
    """A job has raised an error.

    Attributes:
      dead: the groups of which a process is gone or does not answer; ``None`` when that is unknown.
      node_is_gone: whether the node of a process is, which explains the death of a new one.
      by_death: whether it is the consequence of a death, which is reported by itself.
    """

    job: Job
    error: BaseException
    dead: frozenset[int] | None = None
    node_is_gone: bool = False
    by_death: bool = False


Event = Died | Answered | RewindAsked | Repeated | Unneeded | Copying | Lost | Closed | Done | Faulted

"""The entries of the log of requests, with the answers of groups."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from mpmd.runtime.digests import ProcessEvents
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Handle, Released, StepReply, StepRequest
from mpmd.runtime.storage import StoredArray


@dataclasses.dataclass(eq=False)
class LoggedRequest(abc.ABC):
    """A request that each of its groups answers to the user. The journal keeps the answers up to date.

    Attributes:
      waiting: the groups that have not answered in this attempt.
      errors: by group, errors that the user was not given yet.
      results: by group, results of this attempt that the user was not given yet.
      answers: by group, the answers that the user has: the small results of steps and reads; ``None`` after
        an error, and for other kinds of requests.
    """

    waiting: set[int] = dataclasses.field(init=False)
    errors: dict[int, BaseException] = dataclasses.field(init=False, default_factory=dict)
    results: dict[int, Any] = dataclasses.field(init=False, default_factory=dict)
    answers: dict[int, Mapping[Handle, Any] | None] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = set(self.groups)

    @property
    @abc.abstractmethod
    def groups(self) -> frozenset[int]:
        """The groups that were asked."""

    @property
    def is_of_one_attempt(self) -> bool:
        """Whether the results of all groups have to be of the same attempt."""
        return False


@dataclasses.dataclass(eq=False)
class LoggedStep(LoggedRequest):
    """A step that was asked of groups.

    Attributes:
      ordinal: counts the steps of the mesh, from 1.
      events: the messages of the last run on each group that has run it, with digests, if it has any.
      requests: what each group was asked. Programs are not released here: a replay may need them.
      nbytes: of the host arrays that it sends; one that several groups get counts once.
      failure: why it has failed, or cannot run because an earlier step has: it is not run again.
    """

    ordinal: int
    requests: Mapping[int, StepRequest]
    nbytes: int
    failure: str | None = None
    events: dict[int, tuple[ProcessEvents, ...]] = dataclasses.field(default_factory=dict)

    @property
    def groups(self) -> frozenset[int]:
        return frozenset(self.requests)

    @property
    def is_of_one_attempt(self) -> bool:
        """Whether the step is recorded: times of several runs say nothing together."""
        return any(request.profile for request in self.requests.values())

    @property
    def has_taken_over(self) -> bool:
        """Whether it has failed for the first time, and on some group not before its inputs were taken."""
        return self.failure is None and any(
            self.requests[mpmd_idx].donated and not isinstance(self.errors.get(mpmd_idx), LostValueError)
            for mpmd_idx in (self.requests if self.errors else ())
        )

    def give_up(self, reason: str) -> None:
        """Keeps the step from running again. All its results are lost, also results that were there."""
        self.failure = reason
        self.answers = dict.fromkeys(self.answers)

    @property
    def replies(self) -> dict[int, StepReply | None]:
        """The replies of all groups, with the fields that ``compare`` reads; empty if the step has failed."""
        if self.failure is not None or self.events.keys() != self.groups:
            return {}
        return {
            mpmd_idx: StepReply(self.answers[mpmd_idx] or {}, events=events)
            for mpmd_idx, events in self.events.items()
        }

    def adopt(self, replies: Mapping[int, StepReply | None]) -> None:
        """The groups have the values of another run of the step, with these replies.

        The user's answers may be wrong: a later run need not repeat them.
        """
        self.answers = dict.fromkeys(self.answers)
        self.events = {mpmd_idx: reply.events for mpmd_idx, reply in replies.items() if reply is not None}

    def __str__(self) -> str:
        return f"step {self.ordinal}"


@dataclasses.dataclass(eq=False)
class _OfOneGroup(LoggedRequest):
    mpmd_idx: int

    @property
    def groups(self) -> frozenset[int]:
        return frozenset([self.mpmd_idx])


@dataclasses.dataclass(eq=False)
class LoggedRead(_OfOneGroup):
    """Values that a group was asked to read from storage."""

    stored: Mapping[Handle, StoredArray]

    def __str__(self) -> str:
        return "reading from storage"


@dataclasses.dataclass(eq=False)
class LoggedFetch(_OfOneGroup):
    """A value that was asked of a group."""

    handle: Handle


@dataclasses.dataclass(eq=False)
class LoggedCopy(_OfOneGroup):
    """Values that a group was asked to copy to host memory, as ``copy``, to write them to storage."""

    copy: Handle
    handles: tuple[Handle, ...]


@dataclasses.dataclass(eq=False)
class LoggedSnapshot:
    """A snapshot under way, or one that has failed since the last that is committed.

    Attributes:
      number: another one each time it is begun; numbers ascend.
      released: what each group is to drop before it copies.
    """

    number: int
    released: Mapping[int, Released]
    is_copied: bool = False
    has_failed: bool = False


Logged = LoggedRequest | LoggedSnapshot

"""Records of requests with the answers of groups.

The journal's log consists of such records. ``LoggedSnapshot`` is a snapshot of values that begins between two
records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from mpmd.runtime.digests import DigestedMessages
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Handle, Read, Released, Request, StepReply, StepRequest


@dataclasses.dataclass(eq=False)
class Asked:
    """Requests of one kind to groups, and their answers, which the journal keeps up to date.

    Attributes:
      requests: by group.
      released: by group, the values to drop before it answers. No programs: a replay may need them.
      kind: the class of the requests.
      waiting: the groups that have not answered in this attempt.
      errors: by group, errors that the user was not given yet.
      results: by group, results of this attempt that the user was not given yet.
      answers: by group, the answers that the user has: the small results of steps and reads; ``None`` after
        an error, and for other kinds of requests.
      is_dropped: whether nobody needs the copy that it has made, so that a replay need not make it.
    """

    requests: Mapping[int, Request]
    released: Mapping[int, Released] = dataclasses.field(default_factory=dict)
    kind: type[Request] = dataclasses.field(init=False)
    waiting: set[int] = dataclasses.field(init=False)
    errors: dict[int, BaseException] = dataclasses.field(init=False, default_factory=dict)
    results: dict[int, Any] = dataclasses.field(init=False, default_factory=dict)
    answers: dict[int, Mapping[Handle, Any] | None] = dataclasses.field(init=False, default_factory=dict)
    is_dropped: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        (self.kind,) = {type(request) for request in self.requests.values()}
        self.waiting = set(self.requests)

    @property
    def groups(self) -> frozenset[int]:
        return frozenset(self.requests)

    @property
    def is_of_one_attempt(self) -> bool:
        """Whether the results of all groups have to be of the same attempt."""
        return False

    def __str__(self) -> str:
        return "reading from storage" if self.kind is Read else self.kind.__name__


@dataclasses.dataclass(eq=False)
class LoggedStep(Asked):
    """A step that groups were asked for, and that they repeat after a death.

    Attributes:
      nbytes: of the host arrays that it sends; one that several groups get counts once.
      messages: of the last run on each group that has run it; without any if these have no digests.
      failure: why it has failed, or cannot run because an earlier step has: it is not run again.
    """

    nbytes: int = dataclasses.field(init=False)
    messages: dict[int, DigestedMessages] = dataclasses.field(init=False, default_factory=dict)
    failure: str | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        arrays = {id(a): a for request in self.steps.values() for a in request.host_arrays.values()}
        self.nbytes = sum(array.nbytes for array in arrays.values())

    @property
    def steps(self) -> Mapping[int, StepRequest]:
        return cast(Mapping[int, StepRequest], self.requests)

    @property
    def ordinal(self) -> int:
        """The number of the step to people, which counts the steps of the mesh, from 1."""
        return next(iter(self.steps.values())).step

    @property
    def is_of_one_attempt(self) -> bool:
        """Whether the step is recorded: times of several runs say nothing together."""
        return any(request.profile for request in self.steps.values())

    @property
    def has_taken_over(self) -> bool:
        """Whether it has failed for the first time, and on some group not before its inputs were taken."""
        return self.failure is None and any(
            request.donated and not isinstance(self.errors.get(mpmd_idx), LostValueError)
            for mpmd_idx, request in (self.steps.items() if self.errors else ())
        )

    def give_up(self, reason: str) -> None:
        """Keeps the step from running again. All its results are lost, also results that were there."""
        self.failure = reason
        self.answers = dict.fromkeys(self.answers)

    @property
    def replies(self) -> dict[int, StepReply | None]:
        """The replies of all groups, with the fields that ``compare`` reads; empty if the step has failed."""
        if self.failure is not None or self.messages.keys() != self.groups:
            return {}
        return {
            mpmd_idx: StepReply(self.answers[mpmd_idx] or {}, messages=messages)
            for mpmd_idx, messages in self.messages.items()
        }

    def adopt(self, replies: Mapping[int, StepReply | None]) -> None:
        """The groups have the values of another run of the step, with these replies.

        The user's answers may be wrong: a later run need not repeat them.
        """
        self.answers = dict.fromkeys(self.answers)
        self.messages = {mpmd_idx: reply.messages for mpmd_idx, reply in replies.items() if reply is not None}

    def __str__(self) -> str:
        return f"step {self.ordinal}"


@dataclasses.dataclass(eq=False)
class LoggedSnapshot:
    """A snapshot under way.

    Attributes:
      number: the numbers of snapshots ascend.
      released: what each group is to drop before it copies.
      covered: the requests before it, which a replay from this snapshot does not repeat.
    """

    number: int
    released: Mapping[int, Released]
    covered: frozenset[Asked]
    is_copied: bool = False

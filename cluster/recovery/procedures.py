"""The operations on all groups, each from its first to its last phase: replace groups, go back, repeat steps.

A thread of the shell calls these functions for the jobs ``Recover``, ``GoBack`` and ``Rewind``. They decide
nothing: they return facts or raise an error, from which ``membership`` decides whether to try again.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cluster.driver.runtime import LoadRequests
from cluster.recovery.actions import GoBack, KeptHere, Recover, Rewind, Rewound
from cluster.recovery.allocations import NoAllocationError, NodeGoneError
from cluster.recovery.comparison import Replies, StepsRun
from cluster.recovery.copies import Copies
from cluster.recovery.journal import ResultChangedError
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.logged import Asked, LoggedStep
from cluster.recovery.processes import Processes, SupersededError
from cluster.recovery.replacement import GroupLostError
from cluster.recovery.report import FoundValue
from cluster.tcp.connection import Connection
from mpmd.errors import GroupDiedError, NonFiniteError, StepTimeoutError
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.requests import StepReply, sent_with

Answers = Mapping[tuple[Asked, int], Future]
"""The answers of groups, by repeated request and group."""


class Reconnected(NamedTuple):
    """The driver's new connections with all processes, and the groups that have died meanwhile."""

    connections: Sequence[Connection]
    beside: frozenset[int]


def recover(
    job: Recover, processes: Processes, copies: Copies, loads: Mapping[int, LoadRequests]
) -> Reconnected:
    """Replaces the processes of groups, connects all processes again, and has all groups go back.

    A group that dies while new processes take their devices is replaced beside these.

    Args:
      loads: by program number, the requests by which groups load the program.

    Raises: ``GroupLostError``, whose cause is a ``CopiesLostError`` when no process has a good copy of some
      values; ``SupersededError`` when the mesh was closed.
    """
    enter, beside, unopened = job.phases.enter, set[int](), set(job.dead)

    def replace_beside(lost: GroupDiedError) -> None:
        copies.lose(processes.kill({lost.mpmd_idx}))
        processes.start({lost.mpmd_idx})
        beside.add(lost.mpmd_idx)
        unopened.add(lost.mpmd_idx)

    try:
        enter("started")
        copies.lose(processes.kill(job.dead))
        processes.reset(job.dead, list(loads))
        processes.start(job.dead)
        while opening := frozenset(unopened):
            processes.open(opening, replace_beside)
            unopened -= opening
        processes.await_reset()
        copies.check(job.snapshot)
        enter("connected")
        processes.connect()  # after which a process knows what a program's messages need
        enter("loaded")
        processes.load(job.replaced | beside, loads)
        enter("restored")
        copies.restore(job.snapshot)
        enter("connected")
        connections = processes.connect_driver()
        enter("replayed")  # until the report
        return Reconnected(connections, frozenset(beside))
    except SupersededError:
        raise
    except CopiesLostError as lost:
        raise GroupLostError((), beside) from lost
    except Exception as error:
        # Of another error it is not known whose death it is a consequence of.
        dead = {error.mpmd_idx} if isinstance(error, GroupDiedError) else processes.find_dead()
        raise GroupLostError(dead, beside, unopened, _node_is_gone(processes, error)) from error


def _node_is_gone(processes: Processes, error: Exception) -> bool:
    if isinstance(error, NoAllocationError):
        return False
    try:
        processes.allocations.check_nodes(range(len(processes.infos)))
    except NodeGoneError:  # the processes on this node will get other allocations
        return True
    return False


def go_back(job: GoBack | Rewind, copies: Copies) -> tuple[str, ...]:
    """Has all groups, which have answered all requests, go back to a snapshot.

    Returns: a text about each damaged copy of the snapshot.
    Raises: ``CopiesLostError`` when no good copies are left: then no group has gone back.
    """
    if isinstance(job, GoBack):
        job.phases.enter("restored")
    damaged = copies.check(job.snapshot)
    copies.restore(job.snapshot)
    if isinstance(job, GoBack):
        job.phases.enter("replayed")  # until the report
    return damaged


def rewind(
    job: Rewind,
    copies: Copies,
    repeat: Callable[[Sequence[Asked], NonFinitePolicy | None], Answers],
    digests: Callable[[], tuple[ProcessDigests, ...]],
) -> Rewound:
    """Has all groups, which have answered all requests, go back to a snapshot and repeat the steps since.

    When a value was refused, groups have stopped in the middle, and go back and repeat the steps once more.

    Args:
      repeat: asks groups for requests once more.
      digests: returns the digests of the values of all processes.

    Raises: ``CopiesLostError`` when no group has gone back; ``ResultChangedError`` when a group cannot read
      values from storage again; any other error when groups are somewhere in the middle.
    """
    ordinary = StepsRun(job.replies, digests())
    damaged = list(go_back(job, copies))
    answers = repeat(job.entries, job.refused)
    errors = _errors_of(answers)
    found, kept = _refused(errors)
    if errors and job.refused is not None and _late(errors) is None:
        try:
            damaged += go_back(job, copies)
        except CopiesLostError as lost:
            raise RuntimeError(str(lost)) from lost
        answers = repeat(job.entries, None)
        errors = _errors_of(answers)
    if (late := _late(errors)) is not None:
        return Rewound((), found, kept, damaged, late)
    repeated = StepsRun(_replies(answers, errors, job.replies), digests())
    return Rewound((ordinary, repeated), found, kept, damaged)


def _errors_of(answers: Answers) -> dict[tuple[Asked, int], BaseException]:
    """Waits for all answers, and returns the errors among them."""
    concurrent.futures.wait(answers.values())
    errors = {key: error for key, each in answers.items() if (error := each.exception()) is not None}
    for (entry, mpmd_idx), error in errors.items():
        if isinstance(error, GroupDiedError):
            raise error
        if not isinstance(entry, LoggedStep) and entry.answers[mpmd_idx] is not None:
            raise ResultChangedError(entry, mpmd_idx, error)
    return errors


def _late(errors: Mapping[tuple[Asked, int], BaseException]) -> StepTimeoutError | None:
    return next((error for error in errors.values() if isinstance(error, StepTimeoutError)), None)


def _refused(
    errors: Mapping[tuple[Asked, int], BaseException],
) -> tuple[FoundValue | None, tuple[KeptHere, ...]]:
    """The first value that was refused, and the tasks that groups have kept."""
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

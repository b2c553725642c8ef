"""Compares two runs of the same steps bit by bit, and finds where they have begun to differ.

A difference spreads by messages from group to group, and by values from step to step. So only those groups
are named whose first difference is not explained by another group's.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.runtime.digests import DigestedEvent, EventKind, ProcessDigests, ProcessEvents
from mpmd.runtime.requests import Handle, StepReply

Replies = Mapping[int, Mapping[int, StepReply | None]]
"""The replies of each group to each step, by the step's number; ``None`` where it has failed."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The steps since a snapshot, run once.

    Attributes:
      replies: with digests, those of ``DigestScope.TASKS`` or fewer.
      processes: the values that groups had in the end.
    """

    replies: Replies
    processes: tuple[ProcessDigests, ...]


class FaultKind(enum.Enum):
    """A fault that explains why two runs differ."""

    COMPUTED = "computed"
    """A group has computed other bits of the same."""
    KEPT = "kept"
    """A value has changed that no step has made since the snapshot."""
    MESSAGE = "message"
    """A message has not arrived as it was sent."""
    COPY = "copy"
    """A copy of a snapshot has changed where it was kept."""
    REPLICA = "replica"
    """Copies of a value differ that are to be equal."""
    INCONCLUSIVE = "inconclusive"
    """Copies of a value differ that processes of different kinds have computed: it may be no fault."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first bits in which two runs differ.

    Attributes:
      mpmd_idxs: the group; of a message that which has sent it, and that which has received it.
      step: counted from 1; ``None`` where the step is not known.
      devices: those of the group whose bits differ, as far as that is known.
      tasks: the one that has computed them, or those of which one has.
      text: what differs.
      is_ambiguous: one of the groups is at fault, and it cannot be told which.
      may_be_earlier: a task of an earlier step may have computed a part of the state wrong, which shows here.
    """

    kind: FaultKind
    mpmd_idxs: tuple[int, ...]
    step: int | None
    devices: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    text: str = ""
    is_ambiguous: bool = False
    may_be_earlier: bool = False


def faulty_groups(differences: Iterable[Difference]) -> frozenset[int] | None:
    """The groups that are at fault; ``None`` where it cannot be told.

    Several ambiguous differences that have one group in common tell that it is this one.
    """
    told: set[int] = set()
    ambiguous: list[set[int]] = []
    for difference in differences:
        if difference.is_ambiguous:
            ambiguous.append(set(difference.mpmd_idxs))
        else:
            told.update(difference.mpmd_idxs)
    if unexplained := [groups for groups in ambiguous if told.isdisjoint(groups)]:
        common = set.intersection(*unexplained)
        if len(common) != 1:
            return None
        told |= common
    return frozenset(told)


class _First(NamedTuple):
    """The first event of a group in which two runs differ; ``event`` is ``None`` at the end of a step."""

    step: int
    event: DigestedEvent | None
    devices: tuple[str, ...]
    tasks: tuple[str, ...]
    text: str


def differences(first: Run, second: Run, made: Collection[Handle]) -> tuple[Difference, ...]:
    """The first differences of two runs, in the order of the steps; nothing if they are equal.

    Args:
      made: the values that the steps have made. Others live since the snapshot or longer.
    """
    found: dict[int, _First] = {}
    for step in sorted(first.replies.keys() & second.replies.keys()):
        one, other = first.replies[step], second.replies[step]
        for mpmd_idx in sorted(one.keys() & other.keys() - found.keys()):
            if (event := _in_step(step, one[mpmd_idx], other[mpmd_idx])) is not None:
                found[mpmd_idx] = event
    changed = _changed_values(first.processes, second.processes)
    differing = [
        *_of_values(changed, found, made),
        *(
            difference
            for mpmd_idx, event in found.items()
            if (difference := _of_event(first, second, mpmd_idx, event)) is not None
        ),
    ]
    if not differing and (groups := found.keys() | {each.mpmd_idx for each in changed}):
        differing = [
            Difference(FaultKind.COMPUTED, tuple(sorted(groups)), None, is_ambiguous=len(groups) > 1)
        ]
    return tuple(sorted(_one_of_each_group(differing), key=lambda each: each.step or 0))


def _one_of_each_group(differing: Iterable[Difference]) -> list[Difference]:
    """A value that has changed where it was kept explains what the group has computed of it."""
    return list({each.mpmd_idxs: each for each in reversed([*differing])}.values())


def _in_step(step: int, one: StepReply | None, other: StepReply | None) -> _First | None:
    if one is None or other is None:
        return None if one is other else _First(step, None, (), (), "it failed once, and once it did not")
    ranks = {events.rank: events for events in one.events}
    positions = [
        position
        for events in other.events
        if events.rank in ranks
        for position in _first_difference(ranks[events.rank], events)
    ]
    if positions:
        begin = min(position for position, _, _, _ in positions)
        at_begin = [each for each in positions if each[0] == begin]
        devices = tuple(dict.fromkeys(device for _, _, of_rank, _ in at_begin for device in of_rank))
        _, event, _, tasks = at_begin[0]
        return _First(step, event, devices, tasks, _text_of(event))
    if any(
        handle not in other.inline or array.tobytes() != other.inline[handle].tobytes()
        for handle, array in one.inline.items()
    ):
        return _First(step, None, (), (), "a result of the step")
    return None


def _first_difference(
    one: ProcessEvents, other: ProcessEvents
) -> Iterator[tuple[int, DigestedEvent, tuple[str, ...], tuple[str, ...]]]:
    """The first event of a process in which two runs differ: its position, devices, and the tasks before it.

    One of the runs may lack the events of tasks; these tell which ones come into question.
    """
    more, fewer = (one, other) if len(one.events) > len(other.events) else (other, one)
    known = {event[:3]: event for event in fewer.events}
    before: list[str] = []
    all_tasks: list[str] = []
    for position, event in enumerate(more.events):
        if event.kind is EventKind.MADE:
            before.append(event.name)
            all_tasks.append(event.name)
        same = known.get(event[:3])
        if same is None:
            continue
        if same.digests == event.digests:
            before.clear()
            continue
        ours, theirs = dict(event.digests), dict(same.digests)
        devices = tuple(device for device in ours if ours[device] != theirs.get(device))
        if event.kind is EventKind.MADE:
            tasks: Sequence[str] = [event.name]
        else:
            tasks = [] if event.kind is EventKind.RECEIVED else before or all_tasks
        yield position, event, devices, tuple(tasks)
        return


def _text_of(event: DigestedEvent) -> str:
    match event.kind:
        case EventKind.MADE:
            return f"the results of {event.name}"
        case EventKind.SENT:
            return f"message {event.name} to group {event.peer}"
        case EventKind.RECEIVED:
            return f"message {event.name} of group {event.peer}"


def _of_event(first: Run, second: Run, mpmd_idx: int, found: _First) -> Difference | None:
    """The difference that a group's first one is; ``None`` if another group explains it."""
    event = found.event
    if event is None or event.kind is not EventKind.RECEIVED:
        shows_state = event is not None and event.kind is EventKind.SENT and found.step > min(first.replies)
        what = (found.step, found.devices, found.tasks, found.text)
        return Difference(FaultKind.COMPUTED, (mpmd_idx,), *what, may_be_earlier=shows_state)
    assert event.peer is not None, "a message has a sender"
    sent = (EventKind.SENT, event.name, mpmd_idx)
    one, other = (_digests_of(run.replies[found.step].get(event.peer), sent) for run in (first, second))
    if one != other or not one:
        return None
    return Difference(FaultKind.MESSAGE, (event.peer, mpmd_idx), found.step, (), (), found.text, True)


def _digests_of(reply: StepReply | None, key: tuple) -> list:
    if reply is None:
        return []
    return [event.digests for process in reply.events for event in process.events if event[:3] == key]


class _Changed(NamedTuple):
    mpmd_idx: int
    handle: Handle
    type: str
    devices: tuple[str, ...]


def _changed_values(one: Sequence[ProcessDigests], other: Sequence[ProcessDigests]) -> list[_Changed]:
    """The values that both runs have in the end, with other bits."""
    known = {(process.mpmd_idx, process.rank): process for process in one}
    changed = []
    for process in other:
        before = known[process.mpmd_idx, process.rank].values
        for handle in sorted(process.values.keys() & before.keys()):
            value = process.values[handle]
            pairs = zip(value.shards, before[handle].shards, strict=True)
            devices = dict.fromkeys(now.device for now, then in pairs if now.digest != then.digest)
            if devices:
                changed.append(_Changed(process.mpmd_idx, handle, value.type, tuple(devices)))
    return changed


def _of_values(
    changed: Iterable[_Changed], found: Mapping[int, _First], made: Collection[Handle]
) -> Iterator[Difference]:
    """Values that have changed where they were kept; and where nothing else differs, those that were made."""
    for mpmd_idx, handle, type, devices in changed:
        if handle not in made:
            yield Difference(FaultKind.KEPT, (mpmd_idx,), None, devices, (), f"a {type} that no step changes")
        elif mpmd_idx not in found:
            yield Difference(FaultKind.COMPUTED, (mpmd_idx,), None, devices, (), f"a {type} of the state")

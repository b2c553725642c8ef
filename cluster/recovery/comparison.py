"""Compares two runs of the same steps bit by bit, and names the group whose results have differed first.

A difference spreads by messages from group to group, and by values from step to step. So only the first step
that differs counts. A group is at fault there if it has received the same messages in both runs and has
computed different values from them. Which of the two runs was right need not be known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cluster.recovery.report import COMPUTED, UNLOCATED, CorruptionReport
from mpmd.runtime.digests import DigestedMessage, ProcessDigests
from mpmd.runtime.requests import StepReply

Replies = Mapping[int, Mapping[int, StepReply | None]]
"""The replies of each group to each step, by the step's number; ``None`` where it has failed."""


@dataclasses.dataclass(frozen=True)
class StepsRun:
    """The steps since a snapshot, run once.

    Attributes:
      processes: the values that groups had in the end.
    """

    replies: Replies
    processes: tuple[ProcessDigests, ...]


class _Deviation(NamedTuple):
    """The first value of a group that differs in a step.

    Attributes:
      inputs_agree: whether the group had received the same messages before; ``None`` where the messages have
        no digests.
      sender: the group that has sent the value; ``None`` if the group has made it.
    """

    inputs_agree: bool | None
    text: str
    devices: tuple[str, ...] = ()
    sender: int | None = None


def compare(first: StepsRun, second: StepsRun) -> CorruptionReport | None:
    for step in sorted(first.replies.keys() & second.replies.keys()):
        one, other = first.replies[step], second.replies[step]
        deviations = {
            mpmd_idx: deviation
            for mpmd_idx in sorted(one.keys() & other.keys())
            if (deviation := _in_step(one[mpmd_idx], other[mpmd_idx])) is not None
        }
        if deviations:
            return _report(step, deviations, sorted(other), second.processes)
    if deviations := _in_values(first, second):
        return _report(None, deviations, sorted(deviations), second.processes)
    return None


def _report(
    step: int | None,
    deviations: Mapping[int, _Deviation],
    groups: Sequence[int],
    processes: Sequence[ProcessDigests],
) -> CorruptionReport:
    faulty = [mpmd_idx for mpmd_idx, deviation in deviations.items() if deviation.inputs_agree]
    unknown = [mpmd_idx for mpmd_idx, deviation in deviations.items() if deviation.inputs_agree is None]
    if not faulty and len(groups) == 1:
        faulty = unknown
    senders = {each.sender for each in deviations.values() if each.sender is not None}
    # A group whose messages have no digests may have been sent the wrong bits by any group.
    suspects = tuple(faulty or (groups if unknown else sorted(deviations.keys() | senders)))
    named = {mpmd_idx: deviations[mpmd_idx] for mpmd_idx in suspects if mpmd_idx in deviations}
    devices = tuple(dict.fromkeys(device for each in named.values() for device in each.devices))
    places = tuple(process.place for process in processes if process.mpmd_idx in suspects)
    names = " and ".join(f"group {mpmd_idx}" for mpmd_idx in suspects)
    where = f"{names} ({'; '.join([*places, *devices])})"
    at = "" if step is None else f" in step {step}"
    values = "; ".join(f"{each.text} on group {mpmd_idx}" for mpmd_idx, each in named.items())
    if faulty:
        text = f"{where} has computed or kept other bits{at} when steps were repeated: first, {values}"
        return CorruptionReport(COMPUTED, suspects, step, devices, places, text)
    text = (
        f"two runs of the same steps differ{at}, and it cannot be told which group is wrong, or which "
        f"connection, among {where}: first, {values}"
    )
    return CorruptionReport(UNLOCATED, suspects, step, devices, places, text)


def _in_step(one: StepReply | None, other: StepReply | None) -> _Deviation | None:
    if one is None or other is None:
        return None if one is other else _Deviation(None, "the step failed only once")
    if differing := list(_differing_messages(one, other)):
        begin = min(position for position, _, _ in differing)
        pairs = [(before, now) for position, before, now in differing if position == begin]
        devices = tuple(
            device
            for before, now in pairs
            for device, digest in before.digests.items()
            if now.digests.get(device) != digest
        )
        first, _ = pairs[0]
        if first.is_received:
            return _Deviation(False, f"message {first.tag} from group {first.peer}", devices, first.peer)
        return _Deviation(True, f"message {first.tag} to group {first.peer}", devices)
    if any(
        handle not in other.inline or array.tobytes() != other.inline[handle].tobytes()
        for handle, array in one.inline.items()
    ):
        return _Deviation(True if one.messages and other.messages else None, "a result of the step")
    return None


def _differing_messages(
    one: StepReply, other: StepReply
) -> Iterator[tuple[int, DigestedMessage, DigestedMessage]]:
    """The messages that differ, in each process of a group; with their positions in the process's program."""
    for rank, messages in other.messages.items():
        pairs = zip(one.messages.get(rank, ()), messages, strict=False)  # none in a run without digests
        for position, (before, now) in enumerate(pairs):
            if before != now:
                yield position, before, now


def _in_values(first: StepsRun, second: StepsRun) -> dict[int, _Deviation]:
    replies = [
        reply for run in (first, second) for of_step in run.replies.values() for reply in of_step.values()
    ]
    has_digests = bool(replies) and all(reply is not None and reply.messages for reply in replies)
    known = {(process.mpmd_idx, process.rank): process.values for process in first.processes}
    deviations: dict[int, _Deviation] = {}
    for process in second.processes:
        before = known[process.mpmd_idx, process.rank]
        for handle in sorted(process.values.keys() & before.keys()):
            value = process.values[handle]
            pairs = zip(value.shards, before[handle].shards, strict=True)
            devices = tuple(dict.fromkeys(now.device for now, then in pairs if now.digest != then.digest))
            if devices:
                text = f"a {value.type} between steps"
                deviations.setdefault(
                    process.mpmd_idx, _Deviation(True if has_digests else None, text, devices)
                )
    return deviations

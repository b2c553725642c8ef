"""Chooses the simplest of the rows that may be the fastest, and says in one line why each other row lost.

No JAX.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.layer_profile import Kind
from mpmd.planner.pools import AnyCluster
from mpmd.schedules import ForwardOnly, GPipe, Interleaved1F1B, Std1F1B
from mpmd.util.tables import human_bytes

KNOWN_SCHEDULES = (GPipe, Std1F1B, Interleaved1F1B, ForwardOnly)
"""The schedules that pipelines are usually run with. Other schedules have more tasks, messages or
values in flight, whose costs no prediction knows well."""

AS_FAST = 1.01
"""Steps whose times differ by less are as fast: no prediction is more exact."""


def in_order(rows: Sequence[Row], sizes: Sequence[float]) -> list[int]:
    """The positions of the rows that may be the fastest, the preferred one first, then the simplest.

    Among the simplest, a row with fewer tasks and messages precedes a row that is faster by less than
    ``AS_FAST``: each task and message takes time that no prediction knows.

    Args:
      rows: at least one.
      sizes: for each row, the number of the candidate's tasks and messages, in any unit.
    """
    fastest = min(rows, key=lambda row: row.seconds)
    equal = [i for i, row in enumerate(rows) if may_be_as_fast(row, fastest)]
    kinds = {i: complexity(rows[i].candidate) for i in equal}
    equal.sort(key=lambda i: (kinds[i], rows[i].seconds))
    simplest = [i for i in equal if kinds[i] == kinds[equal[0]]]
    limit = AS_FAST * rows[simplest[0]].seconds
    best = min((i for i in simplest if rows[i].seconds <= limit), key=lambda i: sizes[i])
    return [best, *(i for i in equal if i != best)]


class Complexity(NamedTuple):
    """The features that make a candidate less simple, in order of weight.

    Attributes:
      pipeline: whether there is more than one group. Messages between groups, and the runtime that orders
        them, take time that no prediction knows.
      unequal_groups: whether groups differ in their devices.
      unusual_schedule: whether a loop has a schedule that few pipelines run with.
      shared_layers: whether devices share layers. The times of exchanges within each layer are known less
        well than the times of exchanges of gradients.
      several_policies: whether stages differ in their policies.
      sequence_parallel: whether values between layers that devices share are divided, too.
    """

    pipeline: bool
    unequal_groups: bool
    unusual_schedule: bool
    shared_layers: bool
    several_policies: bool
    sequence_parallel: bool


def complexity(candidate: Candidate) -> Complexity:
    unusual = any(
        len(loop.submeshes) > 1
        and (not isinstance(loop.schedule, KNOWN_SCHEDULES) or loop.schedule.slices > 1)
        for loop in candidate.loops
    )
    shared = any(submesh.model * submesh.sequence > 1 for submesh in candidate.submeshes)
    have_policies = any(len(loop.remat) > 1 for loop in candidate.loops)
    pipeline, unequal = len(candidate.submeshes) > 1, len(set(candidate.submeshes)) > 1
    return Complexity(pipeline, unequal, unusual, shared, have_policies, candidate.sequence_parallel)


def may_be_as_fast(row: Row, fastest: Row) -> bool:
    return row.seconds * (1 - row.prediction.expected_error) <= fastest.seconds


def less_simple_because(candidate: Candidate, best: Candidate) -> str:
    """The first feature that makes a candidate less simple than the best, as text; empty without one."""
    pairs = zip(complexity(candidate), complexity(best), strict=True)
    names = ", ".join(dict.fromkeys(loop.schedule_text for loop in candidate.loops))
    texts = (
        "a pipeline is less simple",
        "its groups differ",
        f"{names} is less usual",
        "devices share its layers",
        "its stages have different policies",
        "it divides norms and residuals, too",
    )
    return next((text for text, (here, there) in zip(texts, pairs, strict=True) if here and not there), "")


ALTERNATIVES: dict[str, tuple[Kind | None, bool]] = {
    "one device": (None, False),
    "data parallel": ("data", False),
    "FSDP": ("data", True),
    "tensor parallel": ("model", False),
}
"""For each label, the axis of all devices, and whether weights are divided over it."""


def alternative(candidate: Candidate) -> str:
    if len(candidate.submeshes) > 1:
        return ""
    axes = [kind for kind, size in candidate.submeshes[0].items() if size > 1]
    if len(axes) > 1:
        return ""
    axis = axes[0] if axes else None
    return next((label for label, of_label in ALTERNATIVES.items() if of_label == (axis, candidate.fsdp)), "")


def relabelled(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Labels the first row of each alternative to a pipeline; other labels stay.

    Args:
      rows: the best first.
    """
    labelled: list[Row] = []
    for row in rows:
        label = row.label
        if label in ALTERNATIVES or not label:
            label = alternative(row.candidate)
            label = "" if any(label == other.label for other in labelled) else label
        labelled.append(dataclasses.replace(row, label=label))
    return tuple(labelled)


class StepDoesNotFit(ValueError):
    """A step that no candidate runs in the memory of the devices."""


def ranked(rows: Iterable[Row], cluster: AnyCluster, most: int) -> tuple[Row, ...]:
    """Rows with reasons, the shortest step first; rows that do not fit last.

    Args:
      most: the number of rows without a label. Rows with a label are all kept, and so are the best rows of
        each ``complexity``, which later numbers may show to be as fast.
    """
    ordered = relabelled(sorted(rows, key=lambda row: (bool(shortage(row, cluster)), row.prediction.seconds)))
    best, kept, kinds = ordered[0], list[Row](), set[object]()
    for row in ordered:
        kind = complexity(row.candidate)
        is_first = kind not in kinds
        kinds.add(kind)
        if row.label or is_first or sum(not other.label for other in kept) < most:
            reason = shortage(row, cluster)
            if kept and not reason:
                reason = slower_because(row, best)
            kept.append(dataclasses.replace(row, reason=reason))
    return tuple(kept)


def memory_share(row: Row, cluster: AnyCluster) -> float:
    """Peak memory over the capacity of a device, in the group with the highest peak: 1.1 lacks a tenth."""
    return row.prediction.memory.total / row.capacity(cluster)


def shortage(row: Row, cluster: AnyCluster) -> str:
    """The missing memory as text; empty for a candidate that fits."""
    if row.missing_bytes(cluster) <= 0:
        return ""
    memory, parts = row.prediction.memory, row.prediction.memory.parts
    largest = max(parts, key=parts.__getitem__)
    return (
        f"does not fit: needs {human_bytes(memory.total)} of {human_bytes(row.capacity(cluster))}, "
        f"{human_bytes(parts[largest])} for {largest}"
    )


def slower_because(row: Row, best: Row) -> str:
    """The reason why a candidate is slower than the best: the largest factor of the ratio of their times.

    ``seconds = work / devices / share``, where the work is the seconds that devices compute, and the share
    is the part of the time in which they compute. In the rest of the time they wait or all-reduce.
    """
    ratio = row.seconds / best.seconds if best.seconds else 1.0
    less_simple = less_simple_because(row.candidate, best.candidate)
    if less_simple and may_be_as_fast(row, best):
        error = f"within the expected error of {row.prediction.expected_error:.0%}"
        return f"as fast, {ratio:.2f} times the best {error}; {less_simple}"
    if ratio < AS_FAST:
        return "as fast"
    devices, devices_of_best = _num_devices(row.candidate), _num_devices(best.candidate)
    share, share_of_best = _computing(row.prediction), _computing(best.prediction)
    factors = {
        f"only {devices} of {devices_of_best} devices compute": devices_of_best / devices,
        _lost_text(row.prediction, best.prediction): share_of_best / share,
    }
    work = ratio * (devices / devices_of_best) * (share / share_of_best)
    factors[_work_text(work, row.candidate, best.candidate)] = work
    return f"{ratio:.2f} times the best: {max(factors, key=factors.__getitem__)}"


def _num_devices(candidate: Candidate) -> int:
    return sum(submesh.num_devices for submesh in candidate.submeshes)


def _computing(prediction: Prediction) -> float:
    return max(1 - prediction.bubble - prediction.communication, 0.01)


def _work_text(work: float, candidate: Candidate, best: Candidate) -> str:
    text = f"devices compute {work:.2f} times as much"
    if candidate.is_rematerialised and not best.is_rematerialised:
        return f"{text}, since the backward computes layers again"
    if candidate.is_rematerialised and len(best.remat) > len(candidate.remat):
        return f"{text}, since the backward computes the layers of more stages again"
    if candidate.submeshes == best.submeshes and candidate.num_microbatches > best.num_microbatches:
        return f"{text}: each microbatch reads weights and adds gradients"
    if _num_devices(candidate) > len(candidate.submeshes):
        return f"{text}, since each repeats what they do not divide"
    return text


def _lost_text(prediction: Prediction, best: Prediction) -> str:
    if prediction.communication - best.communication > prediction.bubble - best.bubble:
        return f"all-reduces that no computing hides take {prediction.communication:.0%}"
    text = f"bubble {prediction.bubble:.0%}"
    times = prediction.stage_seconds
    mean = statistics.fmean(times) if times else 0.0
    if mean and max(times) > 1.1 * mean:
        text += f", slowest stage {max(times) / mean:.1f} times the mean"
    return text

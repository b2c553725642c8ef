"""Reasons why a candidate does not run or is not the best, each in one line. No JAX."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.pools import AnyCluster
from mpmd.planner.simplicity import AS_FAST, complexity, less_simple_because, may_be_as_fast
from mpmd.util.tables import human_bytes


class StepDoesNotFit(ValueError):
    """A step that no candidate runs in the memory of the devices."""


def ranked(rows: Iterable[Row], cluster: AnyCluster, most: int) -> tuple[Row, ...]:
    """Rows with reasons, the shortest step first; rows that do not fit last.

    Args:
      most: the number of rows without a label. Rows with a label are all kept, and so are the best rows of
        each ``complexity``, which later numbers may show to be as fast.
    """
    ordered = sorted(rows, key=lambda row: (bool(shortage(row, cluster)), row.prediction.seconds))
    best, kept, kinds = ordered[0], list[Row](), set[object]()
    for row in ordered:
        kind = complexity(row.candidate)
        is_first = kind not in kinds
        kinds.add(kind)
        if row.label or is_first or sum(not other.label for other in kept) < most:
            reason = shortage(row, cluster)
            if kept and not reason:
                reason = slower_because(row.candidate, row.prediction, best.candidate, best.prediction)
            kept.append(dataclasses.replace(row, reason=reason))
    return tuple(kept)


def missing_bytes(candidate: Candidate, prediction: Prediction, cluster: AnyCluster) -> float:
    """The bytes that devices of the group lack that needs most; at most 0 for a candidate that fits."""
    return prediction.memory.total - _capacity(candidate, prediction, cluster)


def memory_share(row: Row, cluster: AnyCluster) -> float:
    """Peak memory over the capacity of a device, in the group with the highest peak: 1.1 lacks a tenth."""
    return row.prediction.memory.total / _capacity(row.candidate, row.prediction, cluster)


def _capacity(candidate: Candidate, prediction: Prediction, cluster: AnyCluster) -> float:
    return cluster.pool(candidate.submeshes[prediction.memory.group].pool).memory


def shortage(row: Row, cluster: AnyCluster) -> str:
    """The missing memory as text; empty for a candidate that fits."""
    if missing_bytes(row.candidate, row.prediction, cluster) <= 0:
        return ""
    memory, parts = row.prediction.memory, row.prediction.memory.parts
    largest = max(parts, key=parts.__getitem__)
    capacity = _capacity(row.candidate, row.prediction, cluster)
    return (
        f"does not fit: needs {human_bytes(memory.total)} of {human_bytes(capacity)}, "
        f"{human_bytes(parts[largest])} for {largest}"
    )


def slower_because(candidate: Candidate, prediction: Prediction, best: Candidate, of_best: Prediction) -> str:
    """The reason why a candidate is slower than the best: the largest factor of the ratio of their times.

    ``seconds = work / devices / share``, where the work is the seconds that devices compute, and the share
    is the part of the time in which they compute. In the rest of the time they wait or all-reduce.
    """
    ratio = prediction.seconds / of_best.seconds if of_best.seconds else 1.0
    less_simple = less_simple_because(candidate, best)
    if less_simple and may_be_as_fast(prediction, of_best):
        error = f"within the expected error of {prediction.expected_error:.0%}"
        return f"as fast, {ratio:.2f} times the best {error}; {less_simple}"
    if ratio < AS_FAST:
        return "as fast"
    devices, devices_of_best = _num_devices(candidate), _num_devices(best)
    share, share_of_best = _computing(prediction), _computing(of_best)
    factors = {
        f"only {devices} of {devices_of_best} devices compute": devices_of_best / devices,
        _lost_text(prediction, of_best): share_of_best / share,
    }
    work = ratio * (devices / devices_of_best) * (share / share_of_best)
    factors[_work_text(work, candidate, best)] = work
    return f"{ratio:.2f} times the best: {max(factors, key=factors.__getitem__)}"


def _num_devices(candidate: Candidate) -> int:
    return sum(submesh.num_devices for submesh in candidate.submeshes)


def _computing(prediction: Prediction) -> float:
    return max(1 - prediction.bubble - prediction.communication, 0.01)


def _work_text(work: float, candidate: Candidate, best: Candidate) -> str:
    text = f"devices compute {work:.2f} times as much"
    if candidate.is_rematerialised and not best.is_rematerialised:
        return f"{text}, layers again in the backward"
    if candidate.is_rematerialised and len(best.remat) > len(candidate.remat):
        return f"{text}, layers of more stages again in the backward"
    if candidate.submeshes == best.submeshes and candidate.num_microbatches > best.num_microbatches:
        return f"{text}: each microbatch reads weights and adds gradients"
    if _num_devices(candidate) > len(candidate.submeshes):
        return f"{text}, each what is not divided"
    return text


def _lost_text(prediction: Prediction, best: Prediction) -> str:
    """Names the larger loss against the best candidate: all-reduces or the bubble."""
    if prediction.communication - best.communication > prediction.bubble - best.bubble:
        return f"all-reduces take {prediction.communication:.0%}"
    text = f"bubble {prediction.bubble:.0%}"
    times = prediction.stage_seconds
    mean = statistics.fmean(times) if times else 0.0
    if mean and max(times) > 1.1 * mean:
        text += f", slowest stage {max(times) / mean:.1f} times the mean"
    return text

"""Groups that share the cores of a node: how many can compute at once, and how long tasks take alone.

A device of a CPU is taken to compute on one core. While more devices compute than there are cores, all go on
equally fast, as ``Costs.at_once`` has it in simulations. That a task sleeps is not known: it counts as one
that computes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from mpmd.ir.process_times import ProcessTimes
from mpmd.ir.routes import Topology


def groups_at_once(processes: Sequence[ProcessTimes], topology: Topology | None = None) -> float:
    """The number of groups that can compute at once as fast as alone, as ``Costs.at_once`` has it.

    It is infinite if that is no limit. Groups on several nodes, or on accelerators, count as having cores of
    their own.

    Args:
      topology: the devices of groups; ``None``: one each.
    """
    computing = [process for process in processes if process.tasks]
    groups = sorted({process.mpmd_idx for process in computing})
    nodes = {process.host.name for process in computing}
    if len(nodes) != 1 or not all(process.on_cores and process.host.cores for process in computing):
        return math.inf
    devices = [math.prod(shape.axes.values()) for shape in topology.groups] if topology else []
    mean = statistics.fmean(devices[group] for group in groups) if devices else 1.0
    cores = {core for process in computing for core in process.host.cores}
    at_once = len(cores) / mean
    return math.inf if at_once >= len(groups) else at_once


def times_alone(starts: Sequence[int], ends: Sequence[int], at_once: float) -> list[int]:
    """The time that each span would take if it had its cores to itself, by the spans that overlap it.

    Where ``n`` spans overlap, each does ``at_once / n`` of the work that it does alone, and at most that.
    """
    moments = sorted({*starts, *ends})
    changes = dict.fromkeys(moments, 0)
    for start, end in zip(starts, ends, strict=True):
        changes[start] += 1
        changes[end] -= 1
    done, number, total = {}, 0, 0.0
    for moment, following in itertools.zip_longest(moments, moments[1:]):
        done[moment] = total
        number += changes[moment]
        if following is not None:
            total += (following - moment) * min(1.0, at_once / max(1, number))
    return [round(done[end] - done[start]) for start, end in zip(starts, ends, strict=True)]

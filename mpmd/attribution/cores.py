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
from mpmd.simulate.costs import loads_of


def sharing(
    processes: Sequence[ProcessTimes], topology: Topology | None = None
) -> tuple[float, tuple[float, ...]]:
    """The number of groups that can compute at once as fast as alone, and the loads of groups.

    Both are as ``Costs`` has them; the number is infinite if that is no limit. Groups on several nodes, or on
    accelerators, count as having cores of their own.

    Args:
      topology: the devices of groups; ``None``: one each.
    """
    computing = [process for process in processes if process.tasks]
    groups = sorted({process.mpmd_idx for process in computing})
    nodes = {process.host.name for process in computing}
    if len(nodes) != 1 or not all(process.on_cores and process.host.cores for process in computing):
        return math.inf, ()
    devices = [math.prod(shape.axes.values()) for shape in topology.groups] if topology else []
    mean = statistics.fmean(devices[group] for group in groups) if devices else 1.0
    cores = {core for process in computing for core in process.host.cores}
    at_once = len(cores) / mean
    if at_once >= len(groups):
        return math.inf, ()
    return at_once, loads_of(devices, mean)


def times_alone(
    starts: Sequence[int], ends: Sequence[int], at_once: float, loads: Sequence[float] = ()
) -> list[int]:
    """The time that each span would take if it had its cores to itself, by the spans that overlap it.

    Where spans overlap whose loads add up to ``n``, each does ``at_once / n`` of what it does alone, and at
    most that.

    Args:
      loads: of each span; by default 1.
    """
    moments = sorted({*starts, *ends})
    changes = dict.fromkeys(moments, 0.0)
    for start, end, load in zip(starts, ends, loads or (1.0,) * len(starts), strict=True):
        changes[start] += load
        changes[end] -= load
    done, load, total = {}, 0.0, 0.0
    for moment, following in itertools.zip_longest(moments, moments[1:]):
        done[moment] = total
        load += changes[moment]
        if following is not None:
            total += (following - moment) * (at_once / load if load > at_once else 1.0)
    return [round(done[end] - done[start]) for start, end in zip(starts, ends, strict=True)]

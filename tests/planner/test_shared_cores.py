"""Tasks on devices that share the cores of their node."""

import dataclasses
import functools
import math

import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.planner.trials import realize
from mpmd.planner.trials.measure import MeasuredTasks
from mpmd.simulate import Link
from tests.support.profiles import layer, profile
from tests.support.small_plans import MICROBATCHES, lowered

SHARED = mpmd.Cluster(1, 4, 1e9, 1e9, 1e9, Link(), Link(), task_overhead=1.0, alone=2.0)
"""Four devices on the cores of two."""


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 2, 1), (3, 1)])
def test_devices_of_one_core_gain_nothing(sizes):
    """A step takes as long on any groups where one device alone computes as fast as all together."""
    cluster = dataclasses.replace(SHARED, alone=4.0, task_overhead=0.0)
    made = profile((layer("", 1e9),) * 4, rows=48)
    layers = {1: (4,), 2: (2, 2), 3: (1, 2, 1)}[len(sizes)]
    submeshes = tuple(Submesh(data=size) for size in sizes)
    candidate = Candidate(layers, submeshes, mpmd.GPipe(len(sizes)), 4, (Remat.NONE,), fsdp=False)
    evaluation = evaluate(CostModel(made, cluster), candidate)
    # 48 rows and 4 layers of 3e9 operations, at four times the 1e9 of a device beside the others.
    assert evaluation.seconds == pytest.approx(48 * 4 * 3 / 4)


@functools.cache
def on_four_devices(size):
    """A step on groups of a size, and their candidate."""
    count = 4 // size
    schedule, submesh = mpmd.Std1F1B(count), {"data": size}
    step = lowered(schedule, [submesh] * count, in_specs=(None, P(None, "data")))
    return step, Candidate((1,) * count, (submesh,) * count, schedule, MICROBATCHES, remat=False, fsdp=False)


@pytest.mark.parametrize(
    "size, nodes, seconds, groups_at_once",
    [(1, 1, 2.0 + 0.5, 2.0), (1, 2, 2.0 + 1.0, math.inf), (2, 1, 2.0 + 0.5, 1.0)],
)
def test_measured_groups_share_cores(monkeypatch, size, nodes, seconds, groups_at_once):
    """Tasks take 2 s by themselves; an overhead is of the time while all compute."""
    count, (step, candidate) = 4 // size, on_four_devices(size)
    keys = [(group, e.name) for group in range(count) for e in step.plan.executables_of(group)]
    tasks = MeasuredTasks(step.plan, dict.fromkeys(keys, 2.0))
    monkeypatch.setattr(realize, "measure_tasks", lambda step: tasks)
    cluster = dataclasses.replace(SHARED, nodes=nodes)
    before = realize.simulated(step, candidate, cluster)
    before = dataclasses.replace(before, prediction=dataclasses.replace(before.prediction, communication=0.3))
    measured = realize.measured(before, candidate, cluster)
    costs = measured.costs
    assert [*costs.tasks.values()] == pytest.approx([seconds] * len(costs.tasks))
    assert costs.at_once == pytest.approx(groups_at_once)
    assert measured.prediction.communication == 0.3, "a share, whatever the times"

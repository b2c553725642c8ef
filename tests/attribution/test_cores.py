"""Groups that share cores: the model has them share, so that nothing is saved that others would use."""

import dataclasses
import math

import pytest

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.cores import groups_at_once
from mpmd.attribution.findings import findings_of
from mpmd.attribution.measured import measure
from mpmd.attribution.model import StepModel
from mpmd.attribution.scenarios import EQUAL_STAGES, OWN_CORES, scenarios_of
from mpmd.ir.plan import TaskType
from mpmd.ir.process_times import Host
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.schedules import FAMILIES, Std1F1B
from mpmd.simulate import Costs, Link, simulate
from tests.support.placements import PLACEMENTS
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import Timing, matched_simulation, matched_steps

SLOW_STAGE = {TaskType("fwd", 1): 3.0, TaskType("bwd", 1): 6.0}


def model_of(plan, costs):
    """The model of a step that was recorded with the times of a simulation."""
    measured = measure(plan, [matched_simulation(plan, simulate(plan, costs))])
    shared = dataclasses.replace(measured, at_once=costs.at_once)
    return StepModel.of(Attribution.of(shared))


@pytest.mark.parametrize("family", PLACEMENTS)
@pytest.mark.parametrize("at_once", [1, 1.5])
def test_the_model_is_the_simulation_of_groups_that_share_cores(family, at_once):
    plan = pipeline_plan(FAMILIES[family].build(4), 8)
    costs = Costs(tasks=SLOW_STAGE, link=Link(latency=0.125))
    shared = dataclasses.replace(costs, at_once=at_once)
    model = model_of(plan, shared)
    assert model.makespan == pytest.approx(simulate(plan, shared).makespan * 1e9)
    apart = next(each for each in scenarios_of(model) if each.name == OWN_CORES)
    assert apart.makespan == pytest.approx(simulate(plan, costs).makespan * 1e9)


PLAN = pipeline_plan(Std1F1B(4), 8)


def test_work_on_one_core_takes_as_long_in_any_order():
    """Equal stages and free messages save nothing where one core does all work."""
    model = model_of(PLAN, Costs(tasks=SLOW_STAGE, at_once=1))
    saves = {each.name: each.saves / model.makespan for each in scenarios_of(model)}
    assert saves[EQUAL_STAGES] == pytest.approx(0, abs=1e-6)
    assert saves["messages free"] == pytest.approx(0, abs=1e-6)
    assert saves[OWN_CORES] > 0.4


def test_cores_that_are_shared_are_a_finding():
    model = model_of(PLAN, Costs(at_once=1))
    finding = next(each for each in findings_of(model, scenarios_of(model)) if each.cause == "cores")
    assert finding.text.startswith(
        "4 groups share cores on which 1 can compute at once, and their tasks take "
    )
    alone = simulate(PLAN).makespan / simulate(PLAN, Costs(at_once=1)).makespan
    assert finding.share_saved == pytest.approx(1 - alone)
    apart = model_of(PLAN, Costs(at_once=4))
    assert all(each.cause != "cores" for each in findings_of(apart, scenarios_of(apart)))


def processes_on(*hosts, on_cores=True):
    plan = pipeline_plan(Std1F1B(len(hosts)), 4)
    (step,) = matched_steps(plan, Timing())
    return [
        dataclasses.replace(times, host=host, on_cores=on_cores)
        for times, host in zip(step.processes, hosts, strict=True)
    ]


def test_the_groups_that_can_compute_at_once():
    two_cores = Host("node", "clock", (0, 1))
    assert groups_at_once(processes_on(*[two_cores] * 4)) == 2
    assert groups_at_once(processes_on(*[two_cores] * 2)) == math.inf
    assert groups_at_once(processes_on(*[two_cores] * 4, on_cores=False)) == math.inf
    assert groups_at_once(processes_on(*[Host("node", "clock")] * 4)) == math.inf
    others = [Host("other", "clock", (0, 1))] * 2
    assert groups_at_once(processes_on(two_cores, two_cores, *others)) == math.inf
    pinned = [Host("node", "clock", (core,)) for core in (0, 1, 0)]
    assert groups_at_once(processes_on(*pinned)) == 2
    topology = Topology(tuple(GroupShape({"data": 2}) for _ in range(2)))
    assert groups_at_once(processes_on(two_cores, two_cores), topology) == 1

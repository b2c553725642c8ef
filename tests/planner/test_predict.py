"""What a plan costs, by simulating it."""

import functools

import pytest

import mpmd
from mpmd.memory import Holding, group_memories
from mpmd.planner.trials.predict import memories_of, predict
from mpmd.simulate import Costs, Link
from tests.support.small_plans import lowered

COSTS = Costs(tasks={("fwd", 0): 1.0, ("bwd", 0): 2.0, ("fwd", 1): 3.0, ("bwd", 1): 4.0})


@functools.cache
def two_groups():
    return lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2)


def predicted(costs=COSTS, **options):
    step = two_groups()
    arrivals = step.compiled.verified.arrivals
    fed_back = {argument for argument, _ in step.compiled.step.fed_back}
    updated = {leaf.name for i, leaf in enumerate(step.plan.inputs) if i in fed_back and leaf.name}
    return step, predict(step.plan, step.topology, arrivals, updated, costs, "simulation", **options)


def test_the_time_is_that_of_the_simulated_plan():
    step, prediction = predicted(reducing=6.0)
    assert prediction.seconds == step.simulate(COSTS).makespan == 1 + 3 * (3 + 4) + 2
    assert prediction.bubble == pytest.approx(step.simulate(COSTS).bubble)
    assert prediction.stage_seconds == (3.0, 7.0)
    assert (prediction.communication, prediction.source) == (0.25, "simulation")
    slow = Costs(tasks=COSTS.tasks, link=Link(latency=1.0))
    assert predicted(slow)[1].seconds == prediction.seconds + 2


def test_the_parts_of_the_memory_are_the_peak_of_the_worst_group():
    step, prediction = predicted()
    peaks = [memory.peak_bytes for memory in group_memories(step.plan, step.compiled.verified.arrivals)]
    assert prediction.memory.total == max(peaks)
    assert prediction.memory.group == peaks.index(max(peaks))
    weight = 8 * 8 * 4
    assert prediction.memory.weights == weight
    assert prediction.memory.gradients >= weight


def test_messages_are_where_the_cluster_has_them():
    step, _ = predicted()
    arrivals = step.compiled.verified.arrivals
    receiver, elsewhere = (
        [memory.peak.messages for memory in memories_of(step.plan, arrivals, holding, ())]
        for holding in (Holding.RECEIVER, Holding.ELSEWHERE)
    )
    assert sum(receiver) > sum(elsewhere) == 0

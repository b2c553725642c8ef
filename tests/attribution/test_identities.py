"""All parts add up, for drawn times of every schedule; and one disturbance alone blames no other cause."""

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpmd
from mpmd.attribution.attribution import Attribution
from mpmd.attribution.ideal import members_alone
from mpmd.attribution.measured import measure
from mpmd.ir.plan import LoopStages, OutsideTask, TaskType
from mpmd.schedules import FAMILIES, Eager1F1B, Interleaved1F1B
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import Timing, matched_steps, unit_time
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, lowered, step_of

NAMED = ("imbalance", "jitter", "message", "handling", "outside", "late_begin", "driver")


def two_loops():
    """A step of two loops with schedules of their own, the second behind the first one's update."""
    first, second = (step_of(schedule) for schedule in (mpmd.Std1F1B(4), mpmd.ZeroBubble(4)))

    def step(weights, xs):
        weights, _ = first(weights, xs)
        return second(weights, xs)

    mesh = mpmd.AbstractMpmdMesh({"stage": 4}, "stage")
    return mpmd.jit(step, mesh).lower(*arguments(4))


def arguments(stages):
    return [np.eye(WIDTH, dtype="float32")] * stages, np.ones((MICROBATCHES, ROWS, WIDTH), "float32")


@pytest.fixture(scope="module")
def compiled_plans():
    fused = mpmd.Interleaved1F1B(4, 2, fuse_steady_state=True)
    uneven = [{"data": 2}, {"data": 1}, {"data": 4}]
    return {
        "two loops": two_loops().plan,
        "fused": lowered(fused, [{"data": 1}] * 2).plan,
        "uneven groups": lowered(Eager1F1B(3, fuse_steady_state=True), uneven).plan,
        "overlapped": lowered(mpmd.DualPipeV(4, 2), [{"data": 1}] * 2).plan,
    }


COMPILED = ("two loops", "fused", "uneven groups", "overlapped")


def check(attribution):
    measured, gaps, accounts = attribution.measured, attribution.gaps, attribution.accounts
    for gap in gaps:
        assert sum(gap.causes) == gap.end - gap.start > 0
        assert min(gap.causes) >= 0
        if gap.causes.elsewhere:
            before = accounts[gap.before].work if gap.before >= 0 else 0
            assert gap.causes.elsewhere <= accounts[gap.waited].work - before - gap.causes.fill
        assert all(0 < culprit.nanoseconds <= gap.end - gap.start for culprit in gap.culprits)
    for group in measured.groups:
        idle = measured.idle(group)
        assert (
            sum(attribution.by_group[group]) == idle == sum(g.end - g.start for g in gaps if g.group == group)
        )
    assert sum(attribution.total) == sum(map(measured.idle, measured.groups))
    assert list(map(sum, accounts)) == list(map(measured.end, range(len(accounts))))
    path = attribution.critical_path
    assert path[0].start == 0
    assert path[-1].end == measured.returned
    assert all(before.end == after.start for before, after in itertools.pairwise(path))


def drawn_timing(rng):
    """A step in which everything is disturbed."""
    speeds = [rng.uniform(0.7, 1.4) for _ in range(64)]

    def duration(group, task):
        noise = rng.lognormvariate(0, 0.1) * (3 if rng.random() < 0.02 else 1)
        stage = 0 if isinstance(task, OutsideTask) else task.tasks[0].stage
        return round(unit_time(group, task) * speeds[stage] * noise)

    return Timing(
        duration=duration,
        flight=lambda edge: rng.randint(0, 300_000),
        handling=lambda: rng.randint(0, 50_000),
        sending=rng.choice([0, 20_000]),
        received=lambda group: rng.randint(0, 500_000),
        arguments=lambda group: rng.choice([0, 100_000]),
        reply=rng.randint(0, 10_000),
    )


def of_family(family, groups, microbatches):
    return pipeline_plan(FAMILIES[family].build(groups), microbatches)


FAMILY = st.sampled_from(list(FAMILIES))


@given(
    FAMILY,
    st.integers(1, 6),
    st.integers(1, 10),
    st.integers(1, 3),
    st.just(0) | st.integers(0, 30_000_000),
    st.integers(),
)
def test_all_parts_add_up(family, groups, extra, steps, error, seed):
    """Also by clocks that are wrong by up to ``error``."""
    rng = random.Random(seed)
    plan = of_family(family, groups, 2 * groups + extra)
    recorded = [
        dataclasses.replace(
            step, processes=tuple(times.shifted(rng.randint(-error, error)) for times in step.processes)
        )
        for step in matched_steps(plan, *(drawn_timing(rng) for _ in range(steps)))
    ]
    check(Attribution.of(measure(plan, recorded)))


@pytest.mark.parametrize("name", COMPILED)
@given(seed=st.integers())
def test_all_parts_of_compiled_plans_add_up(compiled_plans, name, seed):
    plan = compiled_plans[name]
    check(Attribution.of(measure(plan, matched_steps(plan, drawn_timing(random.Random(seed))))))


def disturbed(cause, plan):
    """The times of steps in which one thing is not ideal."""
    last = len(plan.programs) - 1

    def slow_stage(group, task):
        is_slow = not isinstance(task, OutsideTask) and task.tasks[0].stage == 1
        return unit_time(group, task) * (3 if is_slow else 2) // 2

    def hiccups(microbatch, group, task):
        is_slow = not isinstance(task, OutsideTask) and task.tasks[0].microbatch == microbatch
        return unit_time(group, task) * (4 if is_slow else 1)

    def slow_update(group, task):
        is_slow = isinstance(task, OutsideTask) and task.side == "after" and group == 0
        return unit_time(group, task) * (50 if is_slow else 1)

    if cause == "jitter":  # medians are those of steps of which each has its slow microbatch
        return [Timing(duration=functools.partial(hiccups, microbatch)) for microbatch in range(3)]
    timing = {
        None: Timing(),
        "imbalance": Timing(duration=slow_stage),
        "message": Timing(flight=lambda edge: 200_000 * (1 + edge[0])),
        "handling": Timing(handling=lambda: 50_000, sending=20_000),
        "outside": Timing(duration=slow_update),
        "late_begin": Timing(arguments=lambda group: 3_000_000 if group in (0, last) else 0),
        "driver": Timing(received=lambda group: 1_000_000 * (1 + group), reply=50_000),
    }
    return [timing[cause]]


def assert_names_alone(plan, cause):
    attribution = Attribution.of(measure(plan, matched_steps(plan, *disturbed(cause, plan))))
    check(attribution)
    blamed = {name for name in NAMED if getattr(attribution.total, name)}
    assert blamed == ({cause} if cause else set()), attribution.total
    if not cause:
        assert sum(attribution.total) == attribution.total.fill, "nothing is elsewhere"
        assert attribution.ideal.makespan == attribution.measured.returned


@pytest.mark.parametrize("cause", [None, *NAMED])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_disturbance_alone_is_named(family, cause):
    assert_names_alone(of_family(family, 4, 10), cause)


@pytest.mark.parametrize("cause", [None, "jitter", "message", "handling", "late_begin", "driver"])
@pytest.mark.parametrize("name", ["fused", "overlapped"])
def test_one_disturbance_of_fused_tasks_alone_is_named(compiled_plans, name, cause):
    assert_names_alone(compiled_plans[name], cause)


def test_a_delay_that_travels_through_all_groups_keeps_its_name():
    plan = of_family("Std1F1B", 8, 16)

    def duration(group, task):
        return unit_time(group, task) * (10 if str(task) == "fwd_0__8" else 1)

    timing = Timing(duration=duration, flight=lambda edge: 10_000)
    attribution = Attribution.of(measure(plan, matched_steps(plan, timing)))
    for causes in attribution.by_group[1:]:
        assert causes.jitter > 8_000_000
    blamed = {
        str(attribution.measured.workload.tasks[culprit.operation])
        for gap in attribution.gaps
        for culprit in gap.culprits
        if culprit.cause == "jitter"
    }
    assert blamed == {"fwd_0__8"}


def test_a_loop_that_is_slower_than_another_is_no_imbalance():
    """The first loop has stages 0 and 1; a task of the second loop takes twice as long."""
    plan = pipeline_plan(Interleaved1F1B(4, 2), 6)
    loops = (LoopStages("", 0, 2, 6), LoopStages("", 2, 2, 6))

    def duration(group, task):
        is_second = not isinstance(task, OutsideTask) and task.tasks[0].stage >= 2
        return unit_time(group, task) * (2 if is_second else 1)

    steps = matched_steps(plan, Timing(duration=duration))
    of_one, of_two = (
        Attribution.of(measure(dataclasses.replace(plan, loops=of_plan), steps)) for of_plan in ((), loops)
    )
    assert of_two.total.imbalance == of_two.total.elsewhere == 0
    assert any(account.imbalance for account in of_one.accounts)


def test_a_kind_that_runs_only_in_fused_tasks_takes_twice_as_long_as_the_forward():
    fwd, last_fwd, last_bwd = TaskType("fwd", 0), TaskType("fwd", 1), TaskType("bwd", 1)
    alone = members_alone({(fwd,): 100, (last_fwd, last_bwd): 600})
    assert alone == {fwd: 100, last_fwd: 200, last_bwd: 400}

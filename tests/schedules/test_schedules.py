"""Schedules: the lists are those of other systems where they have them, and right for every size.

``expected_schedules.json`` has lists that JaxPP 0.9.2 prints, for ``DualPipeV`` those of the published
recipe.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.render import schedule_grid
from mpmd.schedules import (
    FAMILIES,
    DualPipeV,
    Eager1F1B,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
    ListSchedule,
    LoopedBFS,
    RoundRobin,
    Schedule,
    Std1F1B,
    TaskTimes,
    VShaped,
    ZeroBubbleH2,
    ZeroBubbleV,
    build,
    check_schedule,
    from_text,
    total_order,
    v_shape,
)
from mpmd.schedules.check import makes, needs
from mpmd.simulate import Costs, simulate
from tests.support.lists import figures, flat

ATOMIC = Costs(atomic=True)
EXPECTED = json.loads((pathlib.Path(__file__).parent / "expected_schedules.json").read_text())

groups = st.integers(1, 5)
stages_per_group = st.integers(1, 3)
microbatches = st.integers(1, 12)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A schedule of any family and size."""
    family, p, v = draw(st.sampled_from([*FAMILIES.values()])), draw(groups), draw(stages_per_group)
    if not issubclass(family.schedule, RoundRobin):
        v = family.stages_per_group
    return family.build(p, v * p)


@pytest.mark.parametrize("name", sorted({record["schedule"] for record in EXPECTED}))
def test_the_lists_are_those_of_others(name):
    for record in [record for record in EXPECTED if record["schedule"] == name]:
        lists = build(name, record["mpmd_dim"], record["num_stages"]).tasks(record["num_microbatches"])
        assert lists == from_text("\n".join(record["tasks"])), record


@given(schedule=schedules(), m=microbatches)
def test_every_schedule_of_every_size_can_run_in_ascending_order_on_the_groups_of_its_placement(schedule, m):
    lists = schedule.tasks(m)
    check_schedule(lists, schedule.num_stages, m, schedule.mpmd_dim)
    simulate(lists, ATOMIC)  # it raises an error where groups get stuck
    assert schedule.tasks(m) == lists
    for mpmd_idx, tasks in enumerate(map(flat, lists)):
        stages = [*range(mpmd_idx, schedule.num_stages, schedule.mpmd_dim)]
        if isinstance(schedule, VShaped):
            stages = [mpmd_idx, schedule.num_stages - 1 - mpmd_idx]
        ran = collections.defaultdict(list)
        for task in tasks:
            ran[task.kind, task.stage].append(task.microbatch)
        assert {stage for _, stage in ran} == {*stages}
        assert all(numbers == [*range(m)] for numbers in ran.values())


def interleaved_makespan(p, v, m):
    return 3 * (v * m + p - 1) if m >= p else 3 * (m + v * p - 1)


def first_round(p, m):
    return -(-m // max(1, m // p))


CLOSED_FORMS = {
    GPipe: lambda p, v, m: [m] * p,
    Std1F1B: lambda p, v, m: [min(p - r, m) for r in range(p)],
    Eager1F1B: lambda p, v, m: [min(2 * (p - r) - 1, m) for r in range(p)],
    Interleaved1F1B: lambda p, v, m: [
        min(v * m, (v - 1) * first_round(p, m) + 2 * (p - 1 - r) + 1) for r in range(p)
    ],
    KimiK2: lambda p, v, m: [min(v * m, (v - 1) * first_round(p, m) + 2 * (p - 1 - r) + 2) for r in range(p)],
    InterleavedGPipe: lambda p, v, m: [v * m] * p,
    LoopedBFS: lambda p, v, m: [v * m] * p,
}
"""Microbatches that each of ``p`` groups holds of its ``v`` stages, of ``m`` microbatches in a step."""


@pytest.mark.parametrize("family", CLOSED_FORMS, ids=lambda family: family.__name__)
@given(p=groups, v=stages_per_group, m=microbatches)
def test_bubbles_are_those_of_1f1b_and_memory_is_that_of_the_closed_form(family, p, v, m):
    if not issubclass(family, RoundRobin):
        v = 1
    lists = FAMILIES[family.__name__].build(p, v * p).tasks(m)
    assert figures(lists) == (interleaved_makespan(p, v, m), CLOSED_FORMS[family](p, v, m))
    if family is KimiK2:
        assert simulate(lists, ATOMIC).makespan == interleaved_makespan(p, v, m)


@given(p=groups, v=stages_per_group, m=microbatches)
def test_breadth_first_turns_to_each_stage_once_per_direction(p, v, m):
    for tasks in map(flat, LoopedBFS(p * v, p).tasks(m)):
        turns = [stage for stage, _ in itertools.groupby((task.kind, task.stage) for task in tasks)]
        assert len(turns) == 2 * v


def test_interleaved_1f1b_runs_the_longer_round_first():
    assert schedule_grid(Interleaved1F1B(4, 2).tasks(5)) == (
        "0  0F0 0F1 0F2 2F0 2F1 2F2 .   2B0---- 0F3 2B1---- 0F4 2B2---- 2F3 0B0---- 2F4 0B1---- 0B2---- "
        ".   2B3---- .   2B4---- 0B3---- 0B4----\n"
        "1  .   1F0 1F1 1F2 3F0+3B0---- 3F1+3B1---- 3F2+3B2---- 1F3 1B0---- 1F4 1B1---- 1B2---- 3F3+3B3---- "
        "3F4+3B4---- 1B3---- 1B4---- .   ."
    )


@given(p=groups, v=stages_per_group, m=microbatches)
def test_forwards_alone_fill_and_drain_once(p, v, m):
    makespan = v * m + p - 1 if m >= p else m + v * p - 1
    assert simulate(ForwardOnly(p * v, p).tasks(m)).makespan == makespan
    assert simulate(ForwardOnly(2 * p, p, v_shape(p)).tasks(m)).makespan == 2 * m + 2 * (p - 1)


def test_forwards_can_run_where_another_schedule_has_put_the_weights():
    trained = DualPipeV(8, 4).tasks(3)
    evaluated = ForwardOnly(8, 4, placement=v_shape(4)).tasks(3)
    assert [{task.stage for task in flat(cells)} for cells in evaluated] == [
        {task.stage for task in flat(cells)} for cells in trained
    ]


def test_sizes_that_do_not_fit_are_errors_that_name_those_that_do():
    with pytest.raises(ValueError, match=r"mpmd_dim=4 takes num_stages=4, 8, 12, .*, got num_stages=6"):
        Interleaved1F1B(6, 4)
    with pytest.raises(
        ValueError, match=r"two stages on each group: mpmd_dim=4 takes num_stages=8, got num_stages=4"
    ):
        ZeroBubbleV(4, 4)
    with pytest.raises(ValueError, match=r"num_stages=4 takes memory_limit=4 to 7, got 3; .* VHalf or VMin"):
        ZeroBubbleH2(4, memory_limit=3)
    with pytest.raises(ValueError, match=r"3 stages on 2 groups cannot be placed as placement=\(0, 0, 0\)"):
        ForwardOnly(3, 2, placement=(0, 0, 0))
    with pytest.raises(ValueError, match=r"2 stages on 3 groups cannot be placed"):
        ForwardOnly(2, 3)


def test_schedules_are_values():
    assert len({GPipe(2), GPipe(2), GPipe(3), Std1F1B(2), Interleaved1F1B(2, 2), KimiK2(2, 2)}) == 5
    assert ForwardOnly(2, 2) == ForwardOnly(2, 2, placement=[0, 1])
    times = TaskTimes(fwd=[1, 2])
    assert ListSchedule(2, 2, times=times, memory_limit=[2, 1]) == ListSchedule(2, 2, (0, 1), times, (2, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPipe(2).num_stages = 3  # type: ignore[misc]


@given(st.data())
def test_check_schedule_accepts_exactly_the_orders_that_run(data):
    tasks = Std1F1B(3).tasks(2)
    group = data.draw(st.integers(0, 2))
    tasks[group] = list(data.draw(st.permutations(tasks[group])))
    try:
        simulate(tasks)
    except ValueError:
        with pytest.raises(ValueError):
            check_schedule(tasks, 3, 2)
    else:
        check_schedule(tasks, 3, 2)


@given(schedule=schedules(), m=microbatches)
def test_the_total_order_keeps_each_groups_order(schedule, m):
    tasks = schedule.tasks(m)
    order = total_order(tasks)
    assert [[cell for mpmd_idx, cell in order if mpmd_idx == i] for i in range(schedule.mpmd_dim)] == tasks
    done = set()
    for _, cell in order:
        done |= {makes(task) for task in cell.tasks}
        assert done.issuperset(value for task in cell.tasks for value in needs(task, schedule.numbers))


@given(p=groups, v=stages_per_group, m=microbatches)
def test_a_fused_steady_state_never_gets_stuck_and_is_as_fast_where_messages_have_time(p, v, m):
    for schedule in (Std1F1B(p, fuse_steady_state=True), Eager1F1B(p, fuse_steady_state=True)):
        check_schedule(schedule.tasks(m), p, m, p)
    interleaved = Interleaved1F1B(p * v, p, fuse_steady_state=True).tasks(m)
    check_schedule(interleaved, p * v, m, p)
    fused = [cell for cells in Eager1F1B(p, fuse_steady_state=True).tasks(m) for cell in cells]
    warmups = [2 * (p - 1 - stage) for stage in range(p)]
    assert sum(len(cell.tasks) == 2 for cell in fused) == sum(max(0, m - warmup) for warmup in warmups)
    together = simulate(Eager1F1B(p, fuse_steady_state=True).tasks(m), ATOMIC)
    assert together.makespan == simulate(Eager1F1B(p).tasks(m), ATOMIC).makespan

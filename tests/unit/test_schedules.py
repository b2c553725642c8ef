"""Schedules: the lists are those of JaxPP 0.9.2 where it has them, and right for every other size.

``expected_schedules.json`` holds the lists that JaxPP prints, with the makespan and the peaks of stages'
microbatches in flight that follow from a forward of one unit, a backward of two, and free messages.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.ir import Cell, Task, parse_cell
from mpmd.render import schedule_grid
from mpmd.schedules import (
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    Schedule,
    Std1F1B,
    check_schedule,
    total_order,
)

UNITS = {"fwd": 1, "bwd": 2, "bwdA": 1, "bwdW": 1}
EXPECTED = json.loads((pathlib.Path(__file__).parent / "expected_schedules.json").read_text())
SCHEDULES = {schedule.__name__: schedule for schedule in (GPipe, Std1F1B, Eager1F1B)}

groups = st.integers(1, 6)
stages_per_group = st.integers(1, 4)
microbatches = st.integers(1, 20)


def parse(text: str) -> list[list[Cell]]:
    """The lists of a text with one line per group."""
    lines = text.strip().splitlines()
    return [[parse_cell(cell) for cell in re.findall(r"FusedTask\(.*?\)|\S+", line)] for line in lines]


def simulate(tasks: list[list[Cell]]) -> tuple[int, list[int]] | None:
    """The makespan and each group's peak of forwards without their backward; ``None`` if it gets stuck."""
    queues = [[task for cell in cells for task in cell.tasks] for cells in tasks]
    last_stage = max(task.stage for queue in queues for task in queue)
    ends: dict[tuple[str, int, int], int] = {}
    free = [0] * len(queues)
    peaks = [_peak(queue) for queue in queues]
    while any(queues):
        ready = [
            i for i, queue in enumerate(queues) if queue and ends.keys() >= _inputs(queue[0], last_stage)
        ]
        if not ready:
            return None
        for i in ready:
            task = queues[i].pop(0)
            start = max([free[i], *(ends[value] for value in _inputs(task, last_stage))])
            free[i] = start + UNITS[task.kind]
            ends[task.kind, task.stage, task.microbatch] = free[i]
    return max(free), peaks


def _inputs(task: Task, last_stage: int) -> set[tuple[str, int, int]]:
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "fwd":
        return {("fwd", stage - 1, microbatch)} if stage else set()
    return {("fwd", stage, microbatch)} | ({("bwd", stage + 1, microbatch)} if stage < last_stage else set())


def _peak(queue: list[Task]) -> int:
    return max(itertools.accumulate(1 if task.kind == "fwd" else -1 for task in queue))


def schedule_of(record: dict[str, Any]) -> Schedule:
    if record["schedule"] == "Interleaved1F1B":
        return Interleaved1F1B(record["num_stages"], record["mpmd_dim"])
    return SCHEDULES[record["schedule"]](record["num_stages"])


@pytest.mark.parametrize("name", [*SCHEDULES, "Interleaved1F1B"])
def test_the_lists_are_those_of_jaxpp(name):
    records = [record for record in EXPECTED if record["schedule"] == name]
    assert records
    for record in records:
        tasks = schedule_of(record).tasks(record["num_microbatches"])
        assert tasks == parse("\n".join(record["tasks"])), record
        assert simulate(tasks) == (record["makespan"], record["peaks"]), record


@settings(deadline=None)
@given(p=groups, m=microbatches)
def test_gpipe_holds_all_microbatches(p, m):
    tasks = GPipe(p).tasks(m)
    check_schedule(tasks, p, m, p)
    assert simulate(tasks) == (3 * (m + p - 1), [m] * p)


@settings(deadline=None)
@given(p=groups, m=microbatches)
def test_std_1f1b_holds_as_many_microbatches_as_there_are_stages_from_here_on(p, m):
    tasks = Std1F1B(p).tasks(m)
    check_schedule(tasks, p, m, p)
    assert simulate(tasks) == (3 * (m + p - 1), [min(p - r, m) for r in range(p)])


@settings(deadline=None)
@given(p=groups, m=microbatches)
def test_eager_1f1b_holds_about_twice_as_many(p, m):
    tasks = Eager1F1B(p).tasks(m)
    check_schedule(tasks, p, m, p)
    assert simulate(tasks) == (3 * (m + p - 1), [min(2 * (p - r) - 1, m) for r in range(p)])


@settings(deadline=None)
@given(p=groups, v=stages_per_group, m=microbatches)
def test_interleaved_1f1b_has_the_same_bubble_in_units_of_smaller_stages(p, v, m):
    tasks = Interleaved1F1B(p * v, p).tasks(m)
    check_schedule(tasks, p * v, m, p)
    makespan = 3 * (v * m + p - 1) if m >= p else 3 * (m + v * p - 1)
    first_round = math.ceil(m / max(1, m // p))
    peaks = [min(v * m, (v - 1) * first_round + 2 * (p - 1 - r) + 1) for r in range(p)]
    assert simulate(tasks) == (makespan, peaks)


@settings(deadline=None)
@given(p=groups, v=stages_per_group, m=microbatches)
def test_interleaved_1f1b_always_fuses_the_last_stage(p, v, m):
    last = Interleaved1F1B(p * v, p).tasks(m)[-1]
    fused = [str(cell) for cell in last if len(cell.tasks) > 1]
    s = p * v - 1
    assert fused == [f"FusedTask(fwd_{s}__{i}, bwd_{s}__{i})" for i in range(m)]
    assert sum(task.stage == s for cell in last for task in cell.tasks) == 2 * m


def test_interleaved_1f1b_runs_the_longer_round_first():
    assert schedule_grid(Interleaved1F1B(4, 2).tasks(5)) == (
        "0  0F0 0F1 0F2 2F0 2F1 2F2 .   2B0---- 0F3 2B1---- 0F4 2B2---- 2F3 0B0---- 2F4 0B1---- 0B2---- "
        ".   2B3---- .   2B4---- 0B3---- 0B4----\n"
        "1  .   1F0 1F1 1F2 3F0+3B0---- 3F1+3B1---- 3F2+3B2---- 1F3 1B0---- 1F4 1B1---- 1B2---- 3F3+3B3---- "
        "3F4+3B4---- 1B3---- 1B4---- .   ."
    )


@pytest.mark.parametrize("schedule", [GPipe(2), Std1F1B(2), Eager1F1B(2), Interleaved1F1B(4, 2)])
def test_no_microbatches_is_an_error(schedule):
    with pytest.raises(ValueError, match="at least one microbatch, got num_microbatches=0"):
        schedule.tasks(0)


def test_sizes_that_do_not_fit_are_errors_that_name_those_that_do():
    with pytest.raises(ValueError, match=r"mpmd_dim=4 takes num_stages=4, 8, 12, .*, got num_stages=6"):
        Interleaved1F1B(6, 4)
    with pytest.raises(ValueError, match="Std1F1B needs num_stages to be at least 1, got 0"):
        Std1F1B(0)
    with pytest.raises(ValueError, match="mpmd_dim to be at least 1, got 0"):
        Interleaved1F1B(4, 0)


def test_schedules_are_values():
    assert Std1F1B(4) == Std1F1B(num_stages=4) != Eager1F1B(4)
    assert Interleaved1F1B(8, 4) == Interleaved1F1B(num_stages=8, mpmd_dim=4)
    assert len({GPipe(2), GPipe(2), GPipe(3), Std1F1B(2), Interleaved1F1B(2, 2)}) == 4
    assert repr(GPipe(2)) == "GPipe(num_stages=2)"
    assert (Eager1F1B(3).name, Eager1F1B(3).mpmd_dim) == ("Eager1F1B", 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPipe(2).num_stages = 3  # type: ignore[misc]


def test_a_schedule_of_ones_own_gives_its_tasks_and_nothing_else():
    @dataclasses.dataclass(frozen=True)
    class OneAtATime(Schedule):
        def tasks(self, num_microbatches):
            pairs = list(itertools.product(range(num_microbatches), ("fwd", "bwd")))
            return [[Task(kind, stage, mb) for mb, kind in pairs] for stage in range(self.num_stages)]

    schedule = OneAtATime(num_stages=2, mpmd_dim=2)
    assert (schedule.name, hash(schedule)) == ("OneAtATime", hash(OneAtATime(2, 2)))
    check_schedule(schedule.tasks(3), num_stages=2, num_microbatches=3, mpmd_dim=2)
    assert schedule_grid(schedule.tasks(2)) == (
        "0  F0 .  .  .  B0--- F1 .  .  .  B1---\n"
        "1  .  F0 B0--- .  .  .  F1 B1--- .  ."
    )  # fmt: skip


FAULTS = {
    "missing": (
        "fwd_0__0\nfwd_1__0 bwd_1__0",
        ["missing: bwd_0__0"],
    ),
    "half of a split backward": (
        "fwd_0__0 bwdW_0__0\nfwd_1__0 bwdA_1__0",
        ["missing: bwdA_0__0, bwdW_1__0"],
    ),
    "whole and split": (
        "fwd_0__0 bwdA_0__0 bwdW_0__0 bwd_0__0\nfwd_1__0 bwd_1__0",
        ["there next to a bwdA or bwdW of the same stage and microbatch: bwd_0__0"],
    ),
    "repeated": (
        "fwd_0__0 bwd_0__0 bwd_0__0\nFusedTask(fwd_1__0, bwd_1__0)",
        ["more than once: bwd_0__0 (group 0), bwd_0__0 (group 0)"],
    ),
    "not of this step": (
        "fwd_0__0 bwd_0__0 fwd_2__0\nfwd_1__0 bwd_1__0 fwd_1__1",
        ["not of this step: fwd_2__0 (group 0), fwd_1__1 (group 1)"],
    ),
    "a stage on two groups": (
        "fwd_0__0 bwd_1__0 bwd_0__0\nfwd_1__0",
        ["stage 1 is on more than one group: bwd_1__0 (group 0), fwd_1__0 (group 1)"],
    ),
    "too early": (
        "fwd_0__0 bwd_0__0\nbwd_1__0 fwd_1__0",
        ["group 1 runs bwd_1__0 before fwd_1__0, which it needs"],
    ),
    "too early within a fused task": (
        "fwd_0__0 FusedTask(bwdW_0__0, bwdA_0__0)\nfwd_1__0 bwd_1__0",
        ["group 0 runs bwdW_0__0 before bwdA_0__0, which it needs"],
    ),
    "a fused task that waits for what needs its own result": (
        "FusedTask(fwd_0__0, bwd_0__0)\nfwd_1__0 bwd_1__0",
        [
            "deadlock: group 0 waits at FusedTask(fwd_0__0, bwd_0__0) for bwd_1__0 (group 1); "
            "group 1 waits at fwd_1__0 for fwd_0__0 (group 0)"
        ],
    ),
    "groups": (
        "fwd_0__0 fwd_1__0 bwd_1__0 bwd_0__0",
        ["lists for 1 groups, where mpmd_dim is 2"],
    ),
    "several": (
        "bwd_0__0 fwd_0__0\nfwd_1__0 fwd_1__1",
        [
            "not of this step: fwd_1__1 (group 1)",
            "missing: bwd_1__0",
            "group 0 runs bwd_0__0 before fwd_0__0, which it needs",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_schedule_names_all_faults_and_their_cells(fault):
    text, expected = FAULTS[fault]
    with pytest.raises(ValueError) as caught:
        check_schedule(parse(text), num_stages=2, num_microbatches=1, mpmd_dim=2)
    first, *found = str(caught.value).split("\n  - ")
    assert first == "the schedule cannot run (2 stages, 1 microbatches):"
    assert found == expected


def test_check_schedule_finds_groups_that_wait_for_each_other():
    tasks = parse("fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1\nfwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1")
    with pytest.raises(ValueError) as caught:
        check_schedule(tasks, num_stages=2, num_microbatches=2)
    assert "group 0 waits at bwd_0__0 for bwd_1__0 (group 1)" in str(caught.value)
    assert "group 1 waits at fwd_1__1 for fwd_0__1 (group 0)" in str(caught.value)
    with pytest.raises(ValueError, match="the groups get stuck"):
        total_order(tasks)


def test_check_schedule_rejects_what_is_no_cell() -> None:
    tasks: Any = [["fwd_0__0", None, *parse("fwd_0__0 bwd_0__0")[0]]]
    with pytest.raises(ValueError, match="group 0 has None at position 1: neither a Task nor a FusedTask"):
        check_schedule(tasks, num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match="group 0 has 'fwd_0__0' at position 0"):
        check_schedule(tasks, num_stages=1, num_microbatches=1)


def test_check_schedule_cuts_long_lists():
    with pytest.raises(ValueError, match=r"missing: fwd_0__0, bwd_0__0, .* and 192 more$"):
        check_schedule([[]], num_stages=2, num_microbatches=50)


@settings(deadline=None)
@given(st.data())
def test_check_schedule_accepts_exactly_the_orders_that_run(data):
    tasks = Std1F1B(3).tasks(2)
    group = data.draw(st.integers(0, 2))
    tasks[group] = list(data.draw(st.permutations(tasks[group])))
    if simulate(tasks) is None:
        with pytest.raises(ValueError):
            check_schedule(tasks, 3, 2)
    else:
        check_schedule(tasks, 3, 2)


@settings(deadline=None)
@given(p=groups, v=stages_per_group, m=microbatches)
def test_the_total_order_keeps_each_groups_order(p: int, v: int, m: int) -> None:
    tasks = Interleaved1F1B(p * v, p).tasks(m)
    order = total_order(tasks)
    assert [[cell for mpmd_idx, cell in order if mpmd_idx == i] for i in range(p)] == tasks
    done: set[tuple[str, int, int]] = set()
    for _, cell in order:
        for task in cell.tasks:
            assert _inputs(task, p * v - 1) <= done
            done.add((task.kind, task.stage, task.microbatch))

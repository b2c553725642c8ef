"""The text of a task reads back as the task, and a plan answers what readers ask of it."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.ir.plan import (
    Aval,
    Executable,
    FusedTask,
    LoopStages,
    OutsideTask,
    Run,
    Task,
    parse_cell,
    parse_task,
)
from mpmd.schedules import Std1F1B
from tests.support.plans import pipeline_plan

outside_tasks = st.builds(OutsideTask, st.sampled_from(["before", "after"]), st.integers(0, 99))
outside_tasks |= st.builds(OutsideTask, st.just("between"), st.integers(0, 99), st.integers(1, 99))


@given(outside_tasks)
def test_a_printed_task_outside_the_loop_reads_back(task):
    assert parse_task(str(task)) == task
    assert Run(task, "f", (), ()).label == str(task)


def test_work_outside_the_loop_is_no_cell_of_a_schedule():
    assert str(OutsideTask("after", 0)) == "after_0"
    assert str(OutsideTask("between", 2, loop=1)) == "between_1__2"
    with pytest.raises(ValueError, match="'after_0' is not a task; write"):
        parse_cell("after_0")
    for text in ("after", "after_", "between_0", "after_0__1", "after_-1", "wait for group 2"):
        with pytest.raises(ValueError, match="is not a task; write"):
            parse_task(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "after_0",
        "fwd_1",
        "fwd_1_2",
        "fwd_-1__0",
        "bwdX_0__0",
        "fwd_0__0, bwd_0__0",
        "FusedTask()",
        "FusedTask(fwd_0__0)",
        "FusedTask(fwd_0__0, )",
        "FusedTask(fwd_0__0, FusedTask(fwd_1__0, bwd_1__0))",
    ],
)
def test_other_text_is_an_error(text):
    with pytest.raises(ValueError, match="is not a task; write"):
        parse_cell(text)


def test_a_plan_is_shipped_without_what_was_derived_from_it():
    plan = pipeline_plan(Std1F1B(2), 2)
    fresh = pickle.dumps(plan)
    plan.avals(), plan.executable("fwd")
    assert pickle.dumps(plan) == fresh
    assert pickle.loads(fresh) == plan


def test_stages_are_named_by_their_loops_where_there_are_several():
    plan = pipeline_plan(Std1F1B(2), 3)
    assert (plan.stage_text(1), plan.task_text(Task("fwd", 1, 0))) == ("stage 1", "fwd_1__0")
    loops = LoopStages("Std1F1B", 0, 2, 3), LoopStages("GPipe", 2, 1, 4)
    two = dataclasses.replace(plan, loops=loops)
    assert [two.stage_text(stage) for stage in range(3)] == [
        "stage 0 of loop 0",
        "stage 1 of loop 0",
        "stage 0 of loop 1",
    ]
    assert two.task_text(FusedTask((Task("fwd", 2, 1), Task("bwd", 2, 1)))) == (
        "FusedTask(fwd_2__1, bwd_2__1) (stage 0 of loop 1)"
    )
    assert two.task_text(OutsideTask("between", 0, 1)) == "between_1__0"
    said = """loops:
  loop 0, Std1F1B: stages 0 to 1, 3 microbatches
  loop 1, GPipe: stage 2, 4 microbatches
executables:"""
    assert said in str(two) and "loops:" not in str(dataclasses.replace(plan, loops=loops[:1]))


def test_a_sharding_that_is_still_open_is_printed_as_such():
    vector = Aval((4,), "float32", 4)
    executable = Executable("f", (vector,), (vector,), (0,), (("data",),), (None,))
    assert str(executable) == f"f: {vector} sharded ('data',) donated -> {vector} sharded ?"

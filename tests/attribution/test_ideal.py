"""The ideal schedule: means of kinds within a loop, and shares of fused tasks."""

import dataclasses

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.ideal import members_alone
from mpmd.attribution.measured import measure
from mpmd.ir.plan import LoopStages, OutsideTask, TaskType
from mpmd.schedules import Interleaved1F1B
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import Timing, matched_steps, unit_time

FWD, BWD, LAST_FWD, LAST_BWD = (TaskType(kind, stage) for stage in (0, 1) for kind in ("fwd", "bwd"))


def test_a_loop_that_is_slower_than_another_is_no_imbalance():
    """Stages 0 and 1 are those of the first loop, and take half the time of the second one's."""
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


def test_members_share_a_fused_task_by_the_times_of_their_kinds():
    medians = {(FWD,): 100, (BWD,): 300, (LAST_FWD, LAST_BWD): 600}
    assert members_alone(medians) == {FWD: 100, BWD: 300, LAST_FWD: 150, LAST_BWD: 450}
    assert members_alone({(FWD, BWD): 300}) == {FWD: 100, BWD: 200}
    # The kind that never runs alone counts as twice the forward.
    assert members_alone({(FWD,): 100, (LAST_FWD, LAST_BWD): 600}) == {
        FWD: 100,
        LAST_FWD: 200,
        LAST_BWD: 400,
    }

"""Simulated steps have the same causes as measured ones."""

import pytest

from mpmd.attribution.attribution import attribute
from mpmd.attribution.measured import measure
from mpmd.attribution.simulated import TICKS, attribute_simulation
from mpmd.attribution.texts import gap_text
from mpmd.ir.plan import TaskType
from mpmd.schedules import FAMILIES, Eager1F1B, Std1F1B
from mpmd.simulate import Costs, Link, simulate
from tests.attribution.test_identities import NAMED, check
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import OUTSIDE, UNITS, Timing, matched_steps


@pytest.mark.parametrize("family", FAMILIES)
def test_causes_of_schedules_add_up_to_the_gaps_of_the_simulation(family):
    schedule = FAMILIES[family].build(4)
    costs = Costs(tasks={TaskType("fwd", 1): 1.75}, link=Link(latency=0.125))
    simulation = simulate(schedule.tasks(8), costs)
    attribution = attribute_simulation(simulation)
    check(attribution)
    for group, causes in enumerate(attribution.by_group):
        idle = sum(gap.end - gap.start for gap in simulation.gaps if gap.mpmd_idx == group)
        assert sum(causes) == pytest.approx(idle * TICKS)
    named = {"imbalance", "message"} if family != "ForwardOnly" else {"imbalance"}
    assert all(getattr(attribution.total, cause) > 0 for cause in named)
    assert attribution.total[4:8] == (0, 0, 0, 0)


def test_a_schedule_with_equal_stages_and_free_messages_has_only_fill():
    for schedule in (Std1F1B(4), Eager1F1B(3, fuse_steady_state=True), FAMILIES["DualPipeV"].build(2)):
        for costs in (Costs(), Costs(atomic=True)):
            simulation = simulate(schedule.tasks(8), costs)
            total = attribute_simulation(simulation).total
            assert total.fill == sum(total)
            assert (
                sum(total) == simulation.makespan * simulation.mpmd_dim * TICKS - sum(simulation.busy) * TICKS
            )


def test_a_simulated_plan_has_the_causes_of_the_step_measured_so():
    plan = pipeline_plan(Std1F1B(3), 6)
    outside = {(g, run.task): OUTSIDE for g in range(3) for run in plan.programs[g].runs}
    costs = Costs(kinds=UNITS, outside=outside, link=Link(latency=30_000))
    simulated = attribute_simulation(simulate(plan, costs))
    measured = attribute(measure(plan, matched_steps(plan, Timing(flight=lambda edge: 30_000))))
    assert simulated.total == tuple(TICKS * time for time in measured.total)
    assert [gap.causes for gap in simulated.gaps] == [
        tuple(TICKS * time for time in gap.causes) for gap in measured.gaps
    ]


def test_the_reason_of_a_gap_has_the_words_of_the_simulation_and_the_causes():
    costs = Costs(link=Link(latency=0.25))
    attribution = attribute_simulation(simulate(Std1F1B(2).tasks(2), costs))
    assert [gap_text(attribution, gap) for gap in attribution.gaps] == [
        "waits for bwd_1__0 of group 1: fill 2 s, message 500 ms",
        "waits for bwd_1__1 of group 1: fill 750 ms, message 250 ms",
        "waits for its first input, fwd_0__0 of group 0: fill 1 s, message 250 ms",
        "nothing left to do: fill 2 s, message 250 ms",
    ]
    reasons = {gap.reason for gap in simulate(Std1F1B(2).tasks(2), costs).gaps}
    assert {gap_text(attribution, gap).split(":")[0] for gap in attribution.gaps} <= reasons


def test_groups_that_block_handle_their_messages():
    costs = Costs(link=Link(latency=0.25), blocking=True)
    attribution = attribute_simulation(simulate(Std1F1B(3).tasks(6), costs))
    check(attribution)
    assert attribution.total.handling > 0


def test_groups_that_share_cores_are_slower_at_times():
    attribution = attribute_simulation(simulate(Std1F1B(4).tasks(8), Costs(at_once=2)))
    check(attribution)
    assert {cause for cause in NAMED if getattr(attribution.total, cause)} <= {"jitter"}
    assert sum(account.jitter for account in attribution.accounts) > 0


def test_several_steps_have_no_causes():
    with pytest.raises(ValueError, match="those of one step, and 2 are simulated"):
        attribute_simulation(simulate(Std1F1B(2).tasks(4), steps=2))

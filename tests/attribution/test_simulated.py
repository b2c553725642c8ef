"""Simulated steps have the same causes as measured ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def drawn_costs(rng, stages, **options):
    """Times of which no two are equal, so that one message alone is the last to come."""
    tasks = {
        TaskType(kind, stage): rng.uniform(0.5, 1.5)
        for kind in ("fwd", "bwd", "bwdA", "bwdW")
        for stage in range(stages)
    }
    links = {(src, dst): Link(rng.uniform(0, 2)) for src in range(stages) for dst in range(stages)}
    return Costs(tasks=tasks, links=links, **options)


def assert_reasons_agree(simulation):
    """Each gap of the attribution begins with the reason of the simulation; then its message travels."""
    attribution = attribute_simulation(simulation)
    for gap in attribution.gaps:
        parts = [
            part
            for part in simulation.gaps
            if part.mpmd_idx == gap.group
            and round(part.start * TICKS) >= gap.start - 2
            and round(part.end * TICKS) <= gap.end + 2
        ]
        text = gap_text(attribution, gap).split(":")[0]
        assert text == parts[0].reason
        in_transfer = [part for part in parts if "the transfer of" in part.reason]
        if gap.after >= 0:
            travels = sum(part.end - part.start for part in in_transfer) * TICKS
            of_message = [
                c.nanoseconds for c in gap.culprits if (c.operation, c.cause) == (gap.after, "message")
            ]
            assert sum(of_message) == pytest.approx(travels, abs=10)
            assert gap.causes.message >= travels - 10
    return attribution


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(), groups=st.integers(2, 4))
def test_the_reasons_of_simulated_gaps_are_what_the_causes_say(family, seed, groups):
    schedule = FAMILIES[family].build(groups)
    costs = drawn_costs(random.Random(seed), schedule.num_stages, atomic=True)
    assert_reasons_agree(simulate(schedule.tasks(2 * groups), costs))


def test_the_reasons_of_groups_that_share_cores_agree_too():
    costs = drawn_costs(random.Random(0), 4, at_once=2)
    assert_reasons_agree(simulate(Std1F1B(4).tasks(8), costs))


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

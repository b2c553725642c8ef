"""Simulated reasons and recorded causes name the same task that a group waits for."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.measured import measure
from mpmd.ir.plan import TaskType
from mpmd.schedules import FAMILIES
from mpmd.simulate import Costs, Link, simulate
from tests.attribution.test_identities import check
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import matched_simulation


def drawn_costs(rng, stages):
    """Times of which no two are equal, so that one message alone is the last to come."""
    tasks = {
        TaskType(kind, stage): rng.uniform(0.5, 1.5)
        for kind in ("fwd", "bwd", "bwdA", "bwdW")
        for stage in range(stages)
    }
    links = {(src, dst): Link(rng.uniform(0, 2)) for src in range(stages) for dst in range(stages)}
    return Costs(tasks=tasks, links=links)


@given(st.sampled_from(list(FAMILIES)), st.integers(2, 4), st.integers())
def test_reasons_and_causes_name_the_same_task(family, groups, seed):
    schedule = FAMILIES[family].build(groups)
    plan = pipeline_plan(schedule, 2 * groups)
    simulation = simulate(plan, drawn_costs(random.Random(seed), schedule.num_stages))
    attribution = Attribution.of(measure(plan, [matched_simulation(plan, simulation)]))
    check(attribution)
    workload = attribution.measured.workload
    for gap in (gap for gap in attribution.gaps if gap.after >= 0):
        reasons = [
            part.reason
            for part in simulation.gaps
            if part.mpmd_idx == gap.group
            and gap.start - 2 <= part.start * 1e9
            and part.end * 1e9 <= gap.end + 2
        ]
        if gap.waited >= 0:
            assert reasons[0].endswith(
                f"{workload.task_text(gap.waited)} of group {group_of(workload, gap.waited)}"
            )
        sender = workload.messages.senders[gap.message]
        assert reasons[-1].endswith(
            f"the transfer of {workload.task_text(sender)} from group {group_of(workload, sender)}"
        )


def group_of(workload, operation):
    return next(group for group, end in enumerate(workload.bounds[1:]) if operation < end)

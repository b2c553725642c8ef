"""Recorded steps become columns by operation, message and group."""

import dataclasses

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.measured import measure
from mpmd.schedules import Std1F1B
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import Timing, matched_steps, unit_time

PLAN = pipeline_plan(Std1F1B(3), 4)


def test_medians_are_of_all_steps_and_the_step_is_the_median_one():
    slow = Timing(duration=lambda group, task: unit_time(group, task) * (3 if group == 1 else 1))
    late = Timing(received=lambda group: 1000)
    measured = measure(PLAN, matched_steps(PLAN, slow, late, Timing()))
    assert (measured.step, measured.steps) == (1, 3)
    assert measured.received == [1000] * 3
    assert measured.workload.durations == measured.durations


def test_a_group_of_several_processes_has_the_times_of_its_last_one():
    (step,) = matched_steps(PLAN, Timing(flight=lambda edge: 5000, handling=lambda: 300))
    faster = [
        dataclasses.replace(times.shifted(-7 * (times.mpmd_idx + 1)), rank=1) for times in step.processes
    ]
    together = dataclasses.replace(step, processes=(*step.processes, *faster))
    assert measure(PLAN, [together]) == measure(PLAN, [step])


def test_a_group_without_a_part_in_the_step_is_idle_throughout():
    lone = dataclasses.replace(
        PLAN, programs=(*PLAN.programs, dataclasses.replace(PLAN.programs[0], mpmd_idx=3, instructions=()))
    )
    (step,) = matched_steps(PLAN, Timing(received=lambda group: 1000))
    attribution = Attribution.of(measure(lone, [step]))
    (gap,) = (gap for gap in attribution.gaps if gap.group == 3)
    assert (gap.start, gap.end) == (0, step.returned)
    assert sum(gap.causes) == step.returned

"""Findings are ordered by what they would save, and the planted fault is the first one."""

import dataclasses
import random
import re

import pytest

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.findings import findings_of
from mpmd.attribution.measured import measure
from mpmd.attribution.model import StepModel, flight_times
from mpmd.attribution.scenarios import scenarios_of
from mpmd.ir.plan import OutsideTask
from mpmd.schedules import GPipe, Interleaved1F1B, Std1F1B, ZeroBubble
from tests.support.plans import pipeline_plan
from tests.support.recorded_steps import Timing, matched_steps, unit_time

PLAN = pipeline_plan(Std1F1B(4), 16)


def explained(plan, *timings):
    attribution = Attribution.of(measure(plan, matched_steps(plan, *timings)))
    model = StepModel.of(attribution)
    scenarios = scenarios_of(model)
    return attribution, {s.name: s for s in scenarios}, findings_of(model, scenarios)


def noisy(**others):
    """Times as a real step has them: some noise, messages and handling."""
    rng = random.Random(0)
    duration = others.pop("duration", unit_time)
    defaults = {
        "duration": lambda group, task: round(duration(group, task) * rng.uniform(0.98, 1.02)),
        "flight": lambda edge: 10_000,
        "handling": lambda: 5_000,
        "received": lambda group: 20_000,
    }
    return Timing(**{**defaults, **others})


def is_cell(task, stage):
    return not isinstance(task, OutsideTask) and task.tasks[0].stage == stage


def sleeps_always(group, task):
    return unit_time(group, task) + (4_000_000 if is_cell(task, 2) else 0)


def sleeps_at_times(group, task):
    return unit_time(group, task) + {"fwd_2__4": 40_000_000, "bwd_1__9": 10_000_000}.get(str(task), 0)


def uneven(group, task):
    return unit_time(group, task) * (3 if is_cell(task, 3) else 2) // 2


def test_a_straggler_is_the_first_finding():
    timing = noisy(duration=sleeps_always, processor=lambda group, task: 0.2 if is_cell(task, 2) else 1.0)
    _, _, findings = explained(PLAN, timing, timing, timing)
    assert findings[0].cause == "imbalance"
    assert "group 2 has 2." in findings[0].text
    assert "fwd_2 takes" in findings[0].text
    assert "its process computed for 20% of that: it slept, or waited for cores" in findings[0].text


def test_a_straggler_at_times_is_the_first_finding():
    timing = noisy(duration=sleeps_at_times, processor=lambda group, task: 0.99)
    _, scenarios, findings = explained(PLAN, timing)
    assert findings[0].cause == "jitter"
    assert findings[0].text.startswith("fwd_2 on group 2 for microbatch 4 took 4")
    assert "its process computed throughout" in findings[0].text
    assert findings[0].saves_ns == scenarios["no jitter"].saves > 45_000_000


def test_a_slow_link_is_the_first_finding():
    slow = noisy(flight=lambda edge: 20_000_000 if edge == (1, 2) else 10_000)
    _, scenarios, findings = explained(PLAN, slow)
    assert findings[0].cause == "message"
    whole = scenarios["measured"].makespan
    less = scenarios["link 1 to 2 like the others"].saves / whole
    twice = scenarios["link 1 to 2 twice as fast"].saves / whole
    assert findings[0].text == (
        f"link 1 to 2: twice as fast saves {twice:.1%}; its messages take 20 ms, 2000.0 times those of the "
        f"other links: as fast as these the step would take {less:.1%} less"
    )
    assert less > twice > 0.2
    assert findings[0].saves_ns == scenarios["link 1 to 2 like the others"].saves


def test_links_that_are_all_slow_are_findings_each():
    _, scenarios, findings = explained(PLAN, noisy(flight=lambda edge: 500_000))
    assert "link 1 to 2 like the others" not in scenarios
    share = scenarios["link 1 to 2 twice as fast"].saves / scenarios["measured"].makespan
    assert f"link 1 to 2: twice as fast saves {share:.1%}" in [finding.text for finding in findings]


def test_unequal_stages_are_the_first_finding():
    _, scenarios, findings = explained(PLAN, noisy(duration=uneven))
    assert findings[0].cause == "imbalance"
    assert re.match(
        r"group 3 has 1\.3[34] times the work of the mean group; with equal stages", findings[0].text
    )
    less = 1 - scenarios["equal stages"].makespan / scenarios["measured"].makespan
    assert findings[0].text.endswith(f"the step would take {less:.1%} less")
    assert findings[0].share_saved == pytest.approx(less)


def test_a_late_driver_is_the_first_finding():
    _, _, findings = explained(PLAN, noisy(received=lambda group: 12_000_000 * (1 + group), reply=3_000_000))
    assert findings[0].cause == "driver"
    assert findings[0].text.startswith("requests reached the groups 12 ms to 48 ms after the call")
    assert "3 ms after the last was sent" in findings[0].text


def test_of_a_driver_that_is_late_for_one_group_no_more_is_said():
    received = noisy(received=lambda group: 40_000_000 if group == 1 else 0)
    _, _, findings = explained(PLAN, received)
    assert findings[0].text.startswith(
        "requests reached the groups 0 ns to 40 ms after the call, group 1 last; without that the step"
    )


def test_late_arguments_are_the_first_finding():
    _, _, findings = explained(PLAN, noisy(arguments=lambda group: 30_000_000 if group == 0 else 0))
    assert findings[0].cause == "late_begin"
    assert findings[0].text.startswith("group 0 had the step's arguments 30 ms after its request")


def test_work_outside_of_loops_is_the_first_finding():
    def duration(group, task):
        return unit_time(group, task) * (80 if isinstance(task, OutsideTask) and group == 0 else 1)

    _, _, findings = explained(PLAN, noisy(duration=duration))
    assert findings[0].cause == "outside"
    assert "before_0 on group 0" in findings[0].text or "after_0 on group 0" in findings[0].text


def test_the_fill_of_a_schedule_is_a_question_for_the_planner():
    attribution, _, findings = explained(pipeline_plan(GPipe(4), 8), Timing())
    (finding,) = findings
    assert (finding.cause, finding.saves_ns, finding.operation) == ("fill", 0, -1)
    assert attribution.total.fill == sum(attribution.total)
    assert finding.text.startswith(
        "the schedule leaves groups idle for 26% of the step, with equal stages, too"
    )
    assert (
        "mpmd.plan(train_step, *arguments, cluster=mpmd.Cluster.from_ray(measure=True)) says" in finding.text
    )
    _, _, findings = explained(pipeline_plan(Std1F1B(4), 64), Timing())
    assert findings == ()


def test_findings_are_ordered_by_what_they_save():
    for plan in (PLAN, pipeline_plan(Interleaved1F1B(8, 4), 8), pipeline_plan(ZeroBubble(4), 8)):
        _, _, findings = explained(plan, noisy(duration=uneven))
        saved = [finding.share_saved for finding in findings if finding.cause != "fill"]
        assert saved == sorted(saved, reverse=True)
        assert min(saved) >= 0.001
        place = [finding.cause for finding in findings].index("fill")
        assert all(finding.share_saved >= 0.01 for finding in findings[:place])
        assert all(finding.share_saved < 0.01 for finding in findings[place:])


def test_a_message_that_is_noticed_late_has_not_flown_for_long():
    """A receiver that is busy may see only when it next waits that a message has come."""
    (step,) = matched_steps(PLAN, noisy(duration=uneven))

    def noticed(wait):
        arrived = max(wait.arrived, wait.start + 1000)
        return wait._replace(arrived=arrived, end=max(wait.end, arrived))

    late = [dataclasses.replace(each, waits=tuple(map(noticed, each.waits))) for each in step.processes]
    for processes in (step.processes, tuple(late)):
        recorded = dataclasses.replace(step, processes=processes)
        flights = flight_times(measure(PLAN, [recorded]))
        assert all(flight <= 11_000 for flight in flights.values()), flights


def test_scenarios_without_a_disturbance_save_nothing():
    _, scenarios, _ = explained(PLAN, Timing())
    assert {name: scenario.saves for name, scenario in scenarios.items() if scenario.saves} == {}
    assert scenarios["measured"].makespan == 500_000 * 2 + 19 * 3_000_000


def test_the_model_is_close_to_the_measured_step():
    attribution, scenarios, _ = explained(PLAN, noisy(duration=sleeps_always))
    assert scenarios["measured"].makespan == pytest.approx(attribution.measured.returned, rel=0.01)


def test_a_finding_names_the_task_to_look_at():
    slow = noisy(flight=lambda edge: 20_000_000 if edge == (1, 2) else 10_000, duration=sleeps_at_times)
    attribution, _, findings = explained(PLAN, slow)
    measured = attribution.measured
    link = next(each for each in findings if each.text.startswith("link 1 to 2"))
    assert link.operation in measured.tasks(2)
    messages = measured.workload.messages
    read = [
        measured.workload.edge(message)
        for message, reader in enumerate(messages.readers)
        if reader == link.operation
    ]
    assert (1, 2) in read
    jitter = next(each for each in findings if each.cause == "jitter")
    assert str(measured.workload.tasks[jitter.operation]) == "fwd_2__4"
    assert jitter.text.startswith("fwd_2 on group 2 for microbatch 4")

"""Profiles of real steps: what they record, how they unpack, and that files keep all of it."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

import mpmd
from mpmd.ir.events import Wait
from mpmd.ir.plan import Recv, Send
from mpmd.runtime.recording import host_here
from tests.support.parity import mesh_of
from tests.support.recorded_steps import recovered
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, step_of

STAGES = 3


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(STAGES) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    step = mpmd.jit(step_of(mpmd.Std1F1B(STAGES)), mesh, donate_argnums=0)
    return step.compile(*arguments())


def arguments():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((WIDTH, WIDTH), "float32") for _ in range(STAGES)]
    return weights, rng.standard_normal((MICROBATCHES, ROWS, WIDTH), "float32")


@pytest.fixture(scope="module")
def profile(step):
    return step.profile(*arguments(), steps=3)


def test_it_unpacks_into_the_last_result_and_its_events(step, profile):
    result, events = profile
    weights, xs = arguments()
    for _ in range(3):
        weights, loss = step(weights, xs)
    np.testing.assert_array_equal(result[1], loss)
    assert [event.start for event in events if event.mpmd_idx == 1] == sorted(
        event.start for event in events if event.mpmd_idx == 1
    )
    assert {event.mpmd_idx for event in events} == set(range(STAGES))


def test_every_run_wait_and_send_of_the_plan_is_recorded(step, profile):
    for recorded in profile.recorded:
        for times, program in zip(recorded.processes, step.plan.programs, strict=True):
            assert [task.task for task in times.tasks] == [run.task for run in program.runs]
            sends = [(i.dst, i.tag) for i in program.instructions if isinstance(i, Send)]
            assert [(send.dst, send.tag) for send in times.sends] == sends
            receives = {(i.src, i.tag) for i in program.instructions if isinstance(i, Recv)}
            assert {(wait.src, wait.tag) for wait in times.waits} == receives
    assert all(event.activity.tag is not None for event in profile.events if isinstance(event.activity, Wait))


def test_groups_of_a_machine_share_its_cores(profile):
    cores = len(host_here().cores)
    assert profile.attribution.measured.at_once == (cores if 0 < cores < STAGES else math.inf)


def test_times_are_in_the_order_in_which_they_must_be(profile):
    for matched in profile.steps:
        sent = {(p.mpmd_idx, s.dst, s.tag): s.start for p in matched.processes for s in p.sends}
        for times in matched.processes:
            assert 0 <= times.received <= times.ready <= times.finished <= times.replied <= matched.returned
            for task in times.tasks:
                assert times.ready <= task.start <= task.end <= times.finished
            for wait in times.waits:
                assert sent[wait.src, times.mpmd_idx, wait.tag] <= wait.arrived <= wait.end


def test_a_step_for_which_groups_were_replaced_does_not_count(profile):
    first, *others = profile.recorded
    disturbed = dataclasses.replace(profile, recorded=(recovered(first), *others))
    measured = disturbed.attribution.measured
    assert measured.steps == 2
    without = dataclasses.replace(profile, recorded=tuple(others)).attribution
    assert disturbed.attribution.gaps == without.gaps
    assert measured.workload.durations == without.measured.workload.durations
    assert list(disturbed.recoveries) == [0]
    note = "step 1 of 3 does not count: it ran after groups were replaced, 6"  # 60 s, and some of it
    assert note in str(disturbed)
    assert note not in str(profile)


def test_the_recovery_of_the_only_step_is_not_the_drivers(profile):
    (first, *_) = profile.recorded
    alone = dataclasses.replace(profile, recorded=(recovered(first),))
    assert (
        alone.attribution.total.driver
        <= dataclasses.replace(profile, recorded=(first,)).attribution.total.driver
    )
    assert alone.attribution.measured.returned < 10 * 10**9
    assert re.search(r"groups were replaced for 6\S+ s after its call, which is no part of it", str(alone))


def test_steps_are_marked_while_groups_go_back(step, monkeypatch):
    runtime = type(step._running())
    attempts = iter([4, 4, 6])
    monkeypatch.setattr(runtime, "attempt", property(lambda self: next(attempts)))
    profile = step.profile(*arguments(), steps=2)
    assert [recorded.is_recovered for recorded in profile.recorded] == [False, True]


def test_a_file_keeps_all_but_the_result(profile, tmp_path):
    profile.save(tmp_path / "step.json")
    loaded = mpmd.Profile.load(tmp_path / "step.json")
    assert loaded == profile
    assert loaded.steps == profile.steps
    assert loaded.result is None
    assert str(loaded.plan) == str(profile.plan)
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_an_argument_that_would_be_gone_refuses_several_steps(mesh):
    step = mpmd.jit(step_of(mpmd.Std1F1B(STAGES)), mesh, donate_argnums=(0, 1)).compile(*arguments())
    with pytest.raises(ValueError, match=r"args\[1\] would be gone after the first step"):
        step.profile(*arguments(), steps=2)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, not 0"):
        step.profile(*arguments(), steps=0)


def edit(path, *keys, to):
    """Changes one value of a file; ``to`` is called with the value there."""
    content = json.loads(path.read_text())
    at = content["profile"]
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = to(at[keys[-1]])
    path.write_text(json.dumps(content))


PROCESS = ("recorded", 1, "processes", 2)


@pytest.mark.parametrize(
    ("keys", "to", "message"),
    [
        (("recorded",), lambda steps: [], "it has no step"),
        (PROCESS[:3], lambda processes: processes[:2], "the times of 0 of 1 processes of group 2"),
        ((*PROCESS, "mpmd_idx"), lambda group: -1, "the times of 0 of 1 processes of group 2"),
        (("recorded", 0, "returned"), lambda time: 0, "a step ends before it was called"),
        ((*PROCESS, "replied"), lambda time: 0, "process 0 of group 2 replied before it was asked"),
        ((*PROCESS, "tasks", 0, 2), lambda end: end + 10**12, "process 0 of group 2 did something before"),
        ((*PROCESS, "tasks"), lambda tasks: tasks[1:], "process 0 of group 2 ran other tasks"),
        ((*PROCESS, "waits"), lambda waits: [], "process 0 of group 2 sent or received other messages"),
        (("topology", "groups"), lambda groups: groups[:1], "another number of groups than its plan"),
        (("plan", "executables"), lambda executables: executables[1:], "its plan lacks "),
        (("compile_seconds", "trace"), lambda seconds: float("nan"), "expected a number, not nan"),
    ],
)
def test_a_file_whose_times_are_not_of_its_plan_is_refused(keys, to, message, profile, tmp_path):
    path = tmp_path / "step.json"
    profile.save(path)
    edit(path, *keys, to=to)
    with pytest.raises(ValueError, match=f"step.json is a damaged profile: .*{message}"):
        mpmd.Profile.load(path)


def test_donated_arrays_are_the_last_state_where_a_later_step_cannot_be_called(step, monkeypatch):
    weights, xs = arguments()
    weights, _ = step(weights, xs)
    expected, _ = step([np.asarray(weight) for weight in weights], xs)
    calls, submit = [], step.submit

    def submit_once(call, profile):
        if calls:
            raise KeyboardInterrupt
        calls.append(call)
        return submit(call, profile)

    monkeypatch.setattr(step, "submit", submit_once)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        step.profile(weights, xs, steps=3)
    assert "1 of 3 steps have ended" in interrupted.value.__notes__[-1]
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_an_option_that_may_be_the_steps_own_is_refused(mesh):
    def train_step(weights, xs, steps=2):
        weights, loss = step_of(mpmd.GPipe(STAGES))(weights, xs)
        return weights, loss * steps

    step = mpmd.jit(train_step, mesh, static_argnames="steps")
    with pytest.raises(ValueError, match="steps is an option of profile and an argument of the step"):
        step.compile(*arguments()).profile(*arguments(), steps=3)
    profile = step.profile(*arguments(), 5, steps=3)
    assert len(profile.recorded) == 3


def test_a_directory_is_no_file(profile, tmp_path):
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        profile.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        profile.save(tmp_path / "nowhere" / "step.json")


def test_other_schedules_are_a_question_for_the_planner(profile):
    with pytest.raises(AttributeError, match=r"a profile has no alternatives: mpmd\.plan\(.* compares other"):
        _ = profile.alternatives

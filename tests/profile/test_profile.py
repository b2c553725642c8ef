"""Profiles of real steps: what they record, how they unpack, and that files keep all of it."""

import json

import jax
import numpy as np
import pytest

import mpmd
from mpmd.ir.events import Wait
from mpmd.ir.plan import Recv, Send
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, step_of

STAGES = 3


@pytest.fixture(scope="module")
def mesh():
    with mpmd.MpmdMesh(jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES]), "stage") as mesh:
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


def test_times_are_in_the_order_in_which_they_must_be(profile):
    for matched in profile.steps:
        sent = {(p.mpmd_idx, s.dst, s.tag): s.start for p in matched.processes for s in p.sends}
        for times in matched.processes:
            assert 0 <= times.received <= times.ready <= times.finished <= times.replied <= matched.returned
            for task in times.tasks:
                assert times.ready <= task.start <= task.end <= times.finished
            for wait in times.waits:
                assert sent[wait.src, times.mpmd_idx, wait.tag] <= wait.arrived <= wait.end


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a profile: it is not JSON"),
        ("[" * 100_000, "is not a profile: it is not JSON"),
        ("[]", "is not a profile, which step.profile"),
        (
            '{"format": "mpmd profile", "version": 99}',
            "of version 99, and this release reads version 1",
        ),
        (
            '{"format": "mpmd profile", "version": 1, "profile": 3}',
            "is a damaged profile: expected an object",
        ),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=f"other.json .*{message}"):
        mpmd.Profile.load(tmp_path / "other.json")


def test_a_step_without_a_group_is_refused(profile, tmp_path):
    path = tmp_path / "step.json"
    profile.save(path)
    content = json.loads(path.read_text())
    del content["profile"]["recorded"][1]["processes"][2]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"damaged profile: a step lacks the times of process \(2, 0\)"):
        mpmd.Profile.load(path)


def test_a_directory_is_no_file(profile, tmp_path):
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        profile.save(tmp_path)
    with pytest.raises(TypeError, match="path must be"):
        profile.save(3)

"""Steps that really run, in this process: a stage that sleeps is the first finding, in the report too."""

import jax.numpy as jnp
import pytest

import mpmd
from mpmd.attribution import analysis
from mpmd.runtime import worker
from tests.attribution.test_identities import check
from tests.support.parity import mesh_of
from tests.support.sleeping_tasks import sleep_in_tasks
from tests.support.small_plans import MICROBATCHES, ROWS, WIDTH, step_of

GROUPS = 3


@pytest.fixture(scope="module")
def loaded():
    args = [jnp.ones((WIDTH, WIDTH))] * GROUPS, jnp.ones((MICROBATCHES, ROWS, WIDTH))
    with pytest.MonkeyPatch.context() as patch, mesh_of(GROUPS) as mesh:
        patch.setattr(worker, "Executor", worker.Executor)  # which is put back in the end
        sleep_in_tasks(lambda task: 0.1 if task.stage == 1 else 0.0)
        yield mpmd.jit(step_of(mpmd.Std1F1B(GROUPS)), mesh).compile(*args), args


def test_a_stage_that_sleeps_is_the_first_finding(loaded):
    step, args = loaded
    assert step.report().profile_findings == ()
    assert "what would help" not in str(step.report())
    step(*args)  # once for all that a first run does
    profile = step.profile(*args, steps=3)
    check(profile.attribution)
    assert profile.gaps == profile.attribution.gaps
    assert profile.attribution.measured.steps == 3
    first = profile.findings[0]
    assert first.cause == "imbalance", profile.findings
    assert first.text.startswith("group 1 has ")
    assert first.share_saved > 0.1
    report = step.report()
    assert report.profile_findings is profile.findings, "they are simulated once"
    lines = str(report).splitlines()
    at = lines.index("what would help, by simulation of the last profile:")
    assert lines[at + 1 :] == [f"  - {finding}" for finding in profile.findings[:3]]


def test_a_report_simulates_nothing_until_it_is_shown(loaded, monkeypatch):
    step, args = loaded
    step.profile(*args)
    with monkeypatch.context() as patched:
        patched.setattr(analysis, "scenarios_of", lambda *_: pytest.fail("simulated"))
        report = step.report()
        assert report.executables
    assert report.profile_findings

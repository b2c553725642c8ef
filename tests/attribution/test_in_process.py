"""Steps that really run, in this process: a stage that sleeps is the first finding, in the report too."""

import time

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.attribution import analysis
from tests.attribution.test_identities import check
from tests.support.parity import mesh_of

GROUPS, MICROBATCHES = 3, 4


def sleep(x):
    time.sleep(0.1)
    return x


def step(weights, xs):
    def loss_of(weights, x):
        for stage, weight in enumerate(weights):
            if stage == 1:
                frozen = jax.lax.stop_gradient(x)
                x = x + jax.pure_callback(sleep, frozen, frozen, vmap_method="sequential")
            x = jnp.tanh(x @ weight)
            if stage < GROUPS - 1:
                x = mpmd.mark_stage_end(x)
        return (x**2).mean()

    loss, grads = mpmd.treduce(
        lambda x: jax.value_and_grad(loss_of)(weights, x),
        xs,
        schedule=mpmd.Std1F1B(GROUPS),
        operation=mpmd.Add,
    )
    return jax.tree.map(lambda weight, grad: weight - grad, weights, grads), loss


@pytest.fixture(scope="module")
def loaded():
    weights, xs = [jnp.ones((8, 8))] * GROUPS, jnp.ones((MICROBATCHES, 4, 8))
    with mesh_of(GROUPS) as mesh:
        yield mpmd.jit(step, mesh).lower(weights, xs).compile(), (weights, xs)


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

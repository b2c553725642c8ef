"""Policies of rematerialisation: what the planner counts is what JAX keeps, and steps run with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.profiling.layered_step import layered
from mpmd.planner.profiling.open_step import profile_of
from mpmd.planner.profiling.tracing import EACH_LAYER, traced_layers
from mpmd.planner.reasons import complexity
from mpmd.simulate import Link
from tests.support.parity import assert_close
from tests.support.transformer_step import (
    arguments,
    loss_of,
    scanned_loss_of,
    stacked_arguments,
    train_step,
)

ARGUMENTS = {loss_of: arguments, scanned_loss_of: stacked_arguments}
LOSSES = pytest.mark.parametrize("loss", ARGUMENTS, ids=["written", "scanned"])


def step_of(loss):
    return functools.partial(train_step, loss=loss)


@functools.cache
def profiled(loss):
    return profile_of(step_of(loss), ARGUMENTS[loss](), {})


@pytest.mark.usual("dots_with_no_batch_dims_saveable-scanned")
@LOSSES
@pytest.mark.parametrize("policy", [policy for policy in Remat if policy is not Remat.NONE])
def test_kept_bytes_are_those_of_a_trace_under_the_policy(loss, policy):
    profile, (params, tokens) = profiled(loss), ARGUMENTS[loss]()
    each_layer = dataclasses.replace(EACH_LAYER, remat=(policy,))
    traced = layered(traced_layers(step_of(loss), (params, tokens), {}, each_layer).graph)
    kept = [
        sum(var.aval.size * var.aval.dtype.itemsize for var in traced.residuals(layer))
        for layer in range(traced.num_layers)
    ]
    counted = [layer.recomputation(policy).residuals for layer in profile.layers]
    entering = profile.layers[1].entering
    # Tokens are there anyway. What is before and behind a scan is a function of its own under jax.checkpoint.
    assert counted == pytest.approx(kept, abs=tokens.nbytes + (entering if loss is scanned_loss_of else 0))


def cluster(memory):
    link = Link(1e-6, 1e9)
    return mpmd.Cluster(1, 2, memory, 1e9, 1e9, link, link)


FIXED = {"groups": 2, "schedule": "Std1F1B", "num_microbatches": 4, "memory_margin": 0.0}


def planned(loss, **fixes):
    return mpmd.plan(step_of(loss), *ARGUMENTS[loss](), cluster=cluster(1e12), simulate=1, **FIXED, **fixes)


def test_attention_by_pattern_is_refused_with_the_remedy():
    with pytest.raises(AttributeError, match=r"put jax.checkpoint around the attention"):
        mpmd.Remat.ATTENTION  # noqa: B018
    with pytest.raises(ValueError, match=r"not 'attention'.*put jax.checkpoint around the attention"):
        planned(loss_of, remat=["attention", "none"])


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize(
    "remat",
    [
        *Remat,
        ("dots_with_no_batch_dims_saveable", "none"),
        ("nothing_saveable", "dots_saveable"),
    ],
    ids=lambda remat: str(remat) if isinstance(remat, str) else " then ".join(remat),
)
def test_steps_run_with_the_policy_that_is_asked_for(loss, remat):
    args = ARGUMENTS[loss]()
    choice = planned(loss, num_stages=2, remat=remat)
    assert choice.candidate.remat == ((remat,) if isinstance(remat, str) else remat)
    step = choice.jit(choice.mesh(), donate_argnums=())
    assert_close(step(*args), jax.jit(step_of(loss))(*args))


def test_policies_that_jax_refuses_are_left_out():
    """JAX keeps no complex values."""

    def loss(params, x):
        for p in params:
            x = x @ p / (1 + jnp.abs(x))
        return jnp.mean(jnp.abs(x) ** 2)

    def step(params, x):
        value, grads = mpmd.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), params, grads), value

    args = [np.eye(4, dtype=np.complex64)] * 4, np.ones((8, 4), np.complex64)
    fixes = {"cluster": cluster(1e12), "groups": 2, "submesh": {}, "schedule": "Std1F1B"}
    choice = mpmd.plan(step, *args, num_microbatches=2, simulate=8, **fixes)
    refused = [row for row in choice.rows if "JAX keeps no complex values" in row.reason]
    assert refused and all(row.candidate.is_rematerialised for row in refused)
    with pytest.raises(ValueError, match="JAX keeps no complex values"):
        mpmd.plan(step, *args, num_microbatches=2, remat="dots_saveable", **fixes)


def test_first_stages_compute_again_where_the_last_keep_all():
    def wide(params, x):
        for p in params:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    matrices = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
    args = [matrices] * 5, jnp.ones((64, 16, 8))

    def planned_with(**fixes):
        fixes |= FIXED | {"cluster": cluster(230e3), "simulate": 1, "num_stages": 2}
        return mpmd.plan(step_of(wide), *args, **fixes)

    with pytest.raises(ValueError, match="does not fit"):
        planned_with(remat="none")
    choice = planned_with()
    assert choice.candidate.remat == (Remat.NOTHING_SAVEABLE, Remat.NONE)
    assert "remat nothing_saveable x1, none x1" in " ".join(str(choice).split())  # lines of any width
    seconds = choice.best.prediction.seconds
    uniform = planned_with(remat="nothing_saveable").best.prediction
    assert seconds < uniform.seconds * (1 - uniform.expected_error)


def test_one_policy_for_all_stages_is_the_simplest():
    schedule = mpmd.Std1F1B(2)
    uniform = Candidate((1, 1), ({}, {}), schedule, 4, (Remat.NOTHING_SAVEABLE,), fsdp=False)
    by_stage = dataclasses.replace(uniform, remat=(Remat.NOTHING_SAVEABLE, Remat.NONE))
    assert complexity(uniform) < complexity(by_stage)

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

WIDTH, HEADS, LENGTH, BLOCKS = 8, 2, 16, 2


def block(p, x):
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("btd,dhk->bthk", normal, p["qkv"][i]) for i in range(3))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", heads, p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def written(params, x):
    for p in params:
        x = block(p, x)
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0] ** 2)


def weights(stacked=False, blocks=BLOCKS):
    numbers = np.random.default_rng(0)
    shapes = {
        "qkv": (3, WIDTH, HEADS, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    blocks = [
        {name: numbers.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
        for _ in range(blocks)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks) if stacked else blocks


@functools.cache
def profiled(loss, stacked):
    return profile_of(step_of(loss), (weights(stacked), batch()), {})


def step_of(loss):
    def step(params, x):
        value, grads = mpmd.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def batch(rows=8):
    return np.random.default_rng(1).normal(size=(rows, LENGTH, WIDTH)).astype(np.float32)


LOSSES = pytest.mark.parametrize(
    ("loss", "stacked"), [(written, False), (scanned, True)], ids=["written", "scanned"]
)


@pytest.mark.usual("dots_with_no_batch_dims_saveable-scanned")
@LOSSES
@pytest.mark.parametrize("policy", [policy for policy in Remat if policy is not Remat.NONE])
def test_kept_bytes_are_those_of_a_trace_under_the_policy(loss, stacked, policy):
    step, args = step_of(loss), (weights(stacked), batch())
    profile = profiled(loss, stacked)
    each_layer = dataclasses.replace(EACH_LAYER, remat=(policy,))
    traced = layered(traced_layers(step, args, {}, each_layer).graph)
    kept = [
        sum(var.aval.size * var.aval.dtype.itemsize for var in traced.residuals(layer))
        for layer in range(traced.num_layers)
    ]
    counted = [layer.recomputation(policy).residuals for layer in profile.layers]
    entering = profile.layers[1].entering
    # What is before and behind a scan is a function of its own under jax.checkpoint, with its own residuals.
    assert counted == pytest.approx(kept, abs=entering if stacked else 0)


def test_policies_keep_less_the_more_they_compute_again():
    profile = profiled(written, False)
    assert {*profile.policies} >= {Remat.NONE, Remat.DOTS_SAVEABLE, Remat.NOTHING_SAVEABLE}
    kept = [
        sum(layer.recomputation(policy).residuals for layer in profile.layers) for policy in profile.policies
    ]
    assert kept == sorted(set(kept), reverse=True)


def cluster(memory):
    link = Link(1e-6, 1e9)
    return mpmd.Cluster(1, 2, memory, 1e9, 1e9, link, link)


FIXED = {"groups": 2, "schedule": "Std1F1B", "num_microbatches": 4, "memory_margin": 0.0}


def planned(loss, stacked, memory, **fixes):
    return mpmd.plan(
        step_of(loss), weights(stacked), batch(), cluster=cluster(memory), simulate=1, **FIXED, **fixes
    )


def test_attention_by_pattern_is_refused_with_the_remedy():
    with pytest.raises(AttributeError, match=r"put jax.checkpoint around the attention"):
        mpmd.Remat.ATTENTION  # noqa: B018
    with pytest.raises(ValueError, match=r"not 'attention'.*put jax.checkpoint around the attention"):
        planned(written, False, 1e12, remat=["attention", "none"])


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
def test_steps_run_with_the_policy_that_is_asked_for(loss, stacked, remat):
    args = weights(stacked), batch()
    choice = planned(loss, stacked, 1e12, num_stages=2, remat=remat)
    each = (remat,) if isinstance(remat, str) else remat
    assert choice.candidate.remat == each
    step = choice.jit(choice.mesh(), donate_argnums=())
    wanted = jax.jit(lambda params, x: jax.value_and_grad(loss)(params, x))(*args)
    params, value = step(*args)
    assert_close(mpmd.to_host(value), wanted[0])
    assert_close(mpmd.to_host(params), jax.tree.map(lambda p, g: p - 0.1 * g, args[0], wanted[1]))


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


def wide(params, x):
    for p in params:
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def test_first_stages_compute_again_where_the_last_keep_all():
    args = [{"up": p["up"], "down": p["down"]} for p in weights(blocks=5)], batch(64)

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

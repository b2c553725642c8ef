"""Equal stages share an executable, whatever rules their functions have for differentiation."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, layer, mse, planned, sgd_step, squares, weights

STAGES = 4


@jax.custom_vjp
def with_vjp(h):
    return jnp.sin(h)


with_vjp.defvjp(lambda h: (with_vjp(h), h), lambda h, g: (jnp.cos(h) * g,))


def in_a_scan(layer):
    return lambda params, h: jax.lax.scan(lambda h, _: (layer(params, h), None), h, length=2)[0]


WRAPPERS = {"plain": lambda layer: layer, "jit": jax.jit, "remat": jax.checkpoint, "scan": in_a_scan}


def executables(step):
    """The names of the executables for tasks of a pipeline."""
    plan = planned(step, weights(STAGES), *batch(), groups=STAGES).plan
    return sorted(e.name for e in plan.executables if e.name.startswith(("fwd", "bwd")))


@pytest.mark.usual("with_vjp-scan", "relu-jit")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("apply", [jax.nn.relu, with_vjp], ids=lambda f: f.__name__)
def test_the_stages_between_the_first_and_the_last_share_executables(apply, wrap):
    def loss(params, x, y):
        return mse(params, x, y, wrap(lambda p, h: apply(h @ p["w"] + p["b"])))

    def evaluate(params, xs, ys):
        schedule = mpmd.ForwardOnly(STAGES, STAGES)
        return mpmd.treduce(lambda mb: loss(params, *mb), (xs, ys), schedule, operation=mpmd.Add)

    assert executables(evaluate) == ["fwd_0", "fwd_1", "fwd_3"]
    trained = executables(sgd_step(loss, mpmd.Std1F1B(STAGES)))
    assert trained == ["bwd_0", "bwd_2", "bwd_3", "fwd_0", "fwd_1", "fwd_3"]


def test_stages_that_differ_in_a_number_share_no_executable():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(2.0 * layer(params[0], x))
        for i in (1, 2):
            h = mpmd.mark_stage_end((2.0 + i) * layer(params[i], h))
        return squares(layer(params[3], h), y)

    names = executables(sgd_step(loss, mpmd.Std1F1B(STAGES)))
    assert sum(name.startswith("fwd") for name in names) == STAGES

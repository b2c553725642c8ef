"""Steps of whole batches, which ``mpmd.value_and_grad`` cuts into microbatches.

That these compute in plain JAX what ``jax.value_and_grad`` does of the whole batch is tested by itself.
"""

import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.explicit import draws
from tests.support.models import CLIPPED_ADAM, WIDTH, init, layer, mse, weights
from tests.support.programs.table import Case, program

ROWS = 16
X, Y = draws(ROWS, WIDTH, seed=1), draws(ROWS, WIDTH, seed=2)


def train(loss, params, data=(X, Y), optimizer=CLIPPED_ADAM, stages=2, case=None, **options):
    """Trains ``params`` by the gradients of a loss in four microbatches."""
    options = {"num_microbatches": 4, "schedule": mpmd.Std1F1B(stages), **options}

    def step(state, *data):
        params, opt_state = state
        value, grads = mpmd.value_and_grad(loss, **options)(params, *data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, grads)

    return Case(step, init(params, optimizer), data, stages, **(case or {}))


@program()
def rows_sharded_within_groups():
    """The step cuts them, and they stay sharded."""

    def holds(loaded):
        task = loaded.plan.executable("fwd_0")
        assert (None, "fsdp") in task.in_specs

    specs = {"in_specs": (P(), P("fsdp"), P("fsdp"))}
    return train(mse, weights(2), case={"axes": {"fsdp": 2}, "options": specs, "holds": holds})


def loss_with_aux(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    out = layer(params[1], h)
    aux = {
        "scores": jnp.sum(out, 1),
        "classes": jnp.argmax(out, 1),
        "features": out.T,
        "norms": {"hidden": jnp.mean(h**2), "out": jnp.mean(out**2)},
        "largest": jnp.max(out),
        "right": jnp.sum(jnp.argmax(out, 1) == jnp.argmax(y, 1)),
    }
    return jnp.mean((out - y) ** 2), aux


@program({"mean": "mean", "weights": lambda params, x, y: jnp.sum(x > 0)})
def auxiliary_output_concatenated_and_reduced(reduction):
    rules = {
        "scores": None,
        "classes": None,
        "features": None,
        "norms": {"hidden": None, "out": mpmd.Concat()},
        "largest": mpmd.Max,
        "right": mpmd.Add,
    }
    options = {"has_aux": True, "aux_reduction": rules, "reduction": reduction}
    return train(loss_with_aux, weights(2), **options)

"""A step of a whole batch, which ``mpmd.value_and_grad`` cuts into microbatches.

That this computes in plain JAX what ``jax.value_and_grad`` does of the whole batch is tested by itself.
"""

import jax.numpy as jnp

import mpmd
from tests.support.explicit import draws
from tests.support.models import WIDTH, descend, layer, squares, weights
from tests.support.programs.table import Case, program

ROWS = 16
X, Y = draws(ROWS, WIDTH, seed=1), draws(ROWS, WIDTH, seed=2)


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
    return squares(out, y), aux


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
    differentiate = mpmd.value_and_grad(
        loss_with_aux,
        has_aux=True,
        num_microbatches=4,
        schedule=mpmd.Std1F1B(2),
        aux_reduction=rules,
        reduction=reduction,
    )

    def step(params, x, y):
        value, grads = differentiate(params, x, y)
        return descend(params, grads), (value, grads)

    return Case(step, weights(2), (X, Y), groups=2)

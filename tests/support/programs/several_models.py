"""Several models, or one that is passed twice: each has marks of its own, and all pass the same stages."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import WIDTH, batch, mlp, mse, weights
from tests.support.programs.table import Case, descend, loop, program, train


@program()
def a_teacher_with_a_centre_that_follows_the_student():
    """As in self-distillation: the teacher sees another view, and has no gradient."""

    def step(state, xs, ys):
        student, teacher, centre = state

        def loss(student, x, y):
            target = jax.nn.softmax((mlp(teacher, y) - centre) / 0.5)
            target = jax.lax.stop_gradient(target)
            return optax.softmax_cross_entropy(mlp(student, x), target).mean(), target.mean(0)

        (total, seen), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(student, x, y), (xs, ys), operation=mpmd.Mean
        )
        student = descend(student, grads)
        teacher = optax.incremental_update(student, teacher, 0.1)
        return (student, teacher, 0.9 * centre + 0.1 * seen), (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0]")]
        assert homes[:-1] == [(0,), (0,), (1,), (1,), (2,), (2,)] * 2 and homes[-1] == (2,)

    state = weights(3), weights(3)[::-1], jnp.zeros(WIDTH)
    return Case(step, state, batch(), steps=3, holds=holds)


@program()
def models_that_share_a_compiled_function():
    """The marks of all calls come from one trace of it."""
    apply = jax.jit(mlp)

    def loss(params, x, y):
        policy, reference = params
        mine, other = apply(policy, x), jax.lax.stop_gradient(apply(reference, x))
        return jnp.mean((mine - y) ** 2) + 0.1 * jnp.mean((mine - other) ** 2) + mse(reference, y, x)

    return train(loss, (weights(3), weights(3)[::-1]))

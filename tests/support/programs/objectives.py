"""Objectives of training: contrasts between towers, averaged teachers, heads of several stages."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import BATCH, WIDTH, batch, layer, weights
from tests.support.programs.table import Case, descend, program, train, trains


@program()
def contrastive_loss_across_the_batch():
    def loss(params, x, y):
        a, b = x, y
        for i, p in enumerate(params["towers"]):
            a, b = layer(p, a), layer(p, b)
            if i < 2:
                a, b = mpmd.mark_stage_end((a, b))
        a, b = (h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-3) for h in (a, b))
        logits = a @ b.T * jnp.exp(params["temperature"])
        labels = jnp.arange(BATCH)
        either = [
            optax.softmax_cross_entropy_with_integer_labels(z, labels).mean() for z in (logits, logits.T)
        ]
        return sum(either) / 2

    return train(loss, {"towers": weights(3), "temperature": jnp.float32(0.5)})


@program()
def a_teacher_that_is_an_average_of_the_student():
    """Both pass the same stages; the teacher's output is a target without a gradient."""

    def step(state, xs, ys):
        student, teacher = state

        def loss(student, x, y):
            a, b = x, y
            for i, (p, t) in enumerate(zip(student, teacher, strict=True)):
                a, b = layer(p, a), layer(t, b)
                if i < 2:
                    a, b = mpmd.mark_stage_end((a, b))
            return jnp.mean((a - jax.lax.stop_gradient(b)) ** 2)

        total, grads = trains(student, (xs, ys), loss)
        student = descend(student, grads)
        teacher = jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)
        return (student, teacher), (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0]")]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)] * 2

    return Case(step, (weights(3), weights(3)[::-1]), batch(), holds=holds)


@program()
def several_heads_on_different_stages():
    """Early exits: each stage has a head and a loss of its own, with learned weights."""

    def loss(params, x, y):
        h, losses = x, []
        for i, (p, head) in enumerate(zip(params["layers"], params["heads"], strict=True)):
            h = layer(p, h)
            losses.append(jnp.mean((h @ head - y) ** 2))
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.vdot(jax.nn.softmax(params["mix"]), jnp.stack(losses))

    heads = [jnp.eye(WIDTH) * i for i in range(3)]
    return train(loss, {"layers": weights(3), "heads": heads, "mix": jnp.arange(3.0)})

"""What models are trained for: contrasts, teachers, preferences, adversaries, several heads."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import BATCH, WIDTH, batch, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, train


@program(usual=True)
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


@program(usual=True)
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

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(student, x, y), (xs, ys))
        student = descend(student, grads)
        teacher = jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)
        return (student, teacher), (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0]")]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)] * 2

    return Case(step, (weights(3), weights(3)[::-1]), batch(), holds=holds)


@program()
def distillation_from_a_frozen_teacher_in_the_last_stage():
    def step(state, xs, ys):
        student, teacher = state

        def loss(student, x, y):
            h = mpmd.mark_stage_end(layer(student[0], x))
            h = mpmd.mark_stage_end(layer(student[1], h))
            target = jax.nn.softmax(layer(teacher[1], layer(teacher[0], x)))
            return optax.softmax_cross_entropy(layer(student[2], h), target).mean()

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(student, x, y), (xs, ys))
        return (descend(student, grads), teacher), (total, grads)

    return Case(step, (weights(3), weights(2)), batch())


@program()
def preferences_against_a_reference_policy():
    """Direct preference optimisation: two sequences through two models."""

    def step(state, chosen, rejected):
        policy, reference = state

        def score(policy, x):
            a, b = x, x
            for i, (p, r) in enumerate(zip(policy, reference, strict=True)):
                a, b = layer(p, a), layer(r, b)
                if i < 2:
                    a, b = mpmd.mark_stage_end((a, b))
            return jax.nn.log_softmax(a)[..., 0] - jax.nn.log_softmax(jax.lax.stop_gradient(b))[..., 0]

        def loss(policy, chosen, rejected):
            scores = score(policy, jnp.concatenate([chosen, rejected]))
            good, bad = jnp.split(scores, 2)
            return -jnp.mean(jax.nn.log_sigmoid(good - bad)), jnp.mean(good > bad)

        (total, accuracy), grads = loop(
            lambda *mb: jax.value_and_grad(loss, has_aux=True)(policy, *mb), (chosen, rejected)
        )
        return (descend(policy, grads), reference), (total, accuracy)

    return Case(step, (weights(3), weights(3)), batch())


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


@program()
def an_adversary_in_the_last_stage():
    """Gradients are turned round on their way to the features."""

    @jax.custom_vjp
    def reverse(h):
        return h

    reverse.defvjp(lambda h: (h, None), lambda _, g: (-0.5 * g,))

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = mpmd.mark_stage_end(layer(params[1], h))
        task = jnp.mean((h @ params[2]["w"] - y) ** 2)
        domain = jax.nn.sigmoid(reverse(h) @ params[2]["b"])
        return task - jnp.mean(jnp.log(jnp.where(y[:, 0] > 0, domain, 1 - domain)))

    return train(loss, weights(3))


@program()
def a_generator_and_a_critic():
    """Both losses in one pass, each with a gradient for its own parameters alone."""

    def loss(params, x, y):
        generator, critic = params

        def frozen(tree):
            return jax.tree.map(jax.lax.stop_gradient, tree)

        fake = mpmd.mark_stage_end(layer(generator[0], x))
        fake = mpmd.mark_stage_end(layer(generator[1], fake))

        def judge(critic, h):
            return jnp.mean(layer(critic, h))

        fools = -judge(frozen(critic), fake)
        tells = judge(critic, jax.lax.stop_gradient(fake)) - judge(critic, y)
        return fools + tells

    first, second, critic = weights(3)
    return train(loss, ([first, second], critic))


@program()
def policy_gradients_with_a_value_head():
    """Advantages are normalised over the microbatch, and clipped ratios to older probabilities."""

    def loss(params, x, y):
        observations, (actions, returns, older) = x, y
        h = mpmd.mark_stage_end(layer(params[0], observations))
        h = mpmd.mark_stage_end(layer(params[1], h))
        log_probabilities, value = jax.nn.log_softmax(h @ params[2]["w"]), h @ params[2]["b"]
        mine = jnp.take_along_axis(log_probabilities, actions[:, None], -1)[:, 0]
        advantage = jax.lax.stop_gradient(returns - value)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-3)
        ratio = jnp.exp(mine - older)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        entropy = -jnp.mean(jnp.sum(jnp.exp(log_probabilities) * log_probabilities, -1))
        return policy + 0.5 * jnp.mean((value - returns) ** 2) - 0.01 * entropy

    xs, ys = batch()
    return train(loss, weights(3), data=(xs, (jnp.argmax(ys, -1), ys[..., 0], -jnp.abs(ys[..., 1]))))


@program()
def hyperparameters_in_the_batch():
    """A weight of the loss and a mask of the layers that come with each microbatch."""

    def loss(params, x, y):
        x, (scale, keep) = x, y[1]
        h = x
        for i, p in enumerate(params):
            h = jnp.where(keep[i], layer(p, h), h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return scale * jnp.mean((h - y[0]) ** 2)

    xs, ys = batch()
    keep = jnp.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    return train(loss, weights(3), data=(xs, (ys, (jnp.arange(4.0), keep))))


@program()
def linear_probes_on_frozen_features():
    def step(state, xs, ys):
        heads, features = state

        def loss(heads, x, y):
            h, total = x, 0.0
            for i, p in enumerate(features):
                h = layer(p, h)
                total += jnp.mean((h @ heads[i] - y) ** 2)
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return total

        total, grads = loop(lambda x, y: jax.value_and_grad(loss)(heads, x, y), (xs, ys))
        return (descend(heads, grads), features), (total, grads)

    return Case(step, ([jnp.eye(WIDTH)] * 3, weights(3)), batch())


@program()
def a_loss_over_two_forward_passes_of_the_stages():
    """Consistency between two views, both in one anchor."""

    def loss(params, x, y):
        views = jnp.stack([x, x + 0.1])
        a, b = mse_views(params, views)
        return jnp.mean((a - y) ** 2) + jnp.mean((a - b) ** 2)

    def mse_views(params, views):
        h = views
        for i, p in enumerate(params):
            h = layer(p, h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return h

    return train(loss, weights(3))


@program()
def mse_with_a_learned_variance():
    def loss(params, x, y):
        return mse(params["layers"], x, y) * jnp.exp(-params["log"]) + params["log"]

    return train(loss, {"layers": weights(3), "log": jnp.zeros(())})

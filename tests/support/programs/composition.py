"""Steps that do more than a loop and an update: before it, after it, and with what they close over."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd
from tests.support.models import BATCH, MICROBATCHES, SGD, WIDTH, batch, keys, layer, mlp, mse, weights
from tests.support.programs.table import Case, descend, loop, program


def without_marks(params, h):
    for p in params:
        h = layer(p, h)
    return h


def trains(params, data, loss=mse, stages=3):
    return loop(lambda *mb: jax.value_and_grad(loss)(params, *mb), data, stages)


@program(on_ray=True)
def validation_after_the_update():
    """The whole model, without marks: its weights have to meet somewhere."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        new = descend(state, grads)
        return new, (total, jnp.mean((without_marks(new, xs[0]) - ys[0]) ** 2))

    return Case(step, weights(3), batch())


@program()
def the_whole_model_before_the_loop():
    """Targets from an evaluation of the current weights."""

    def step(state, xs, ys):
        targets = ys + 0.1 * jax.lax.stop_gradient(without_marks(state, xs))
        total, grads = trains(state, (xs, targets))
        return descend(state, grads), total

    return Case(step, weights(3), batch())


@program(usual=True)
def embedding_before_the_loop():
    def step(state, tokens, ys):
        table, params = state
        total, grads = trains(params, (table[tokens], ys))
        return (table * 0.9, descend(params, grads)), total

    tokens = jax.random.randint(keys(1)[0], (MICROBATCHES, BATCH), 0, 5)
    table = jax.random.normal(keys(1)[0], (5, WIDTH))
    return Case(step, (table, weights(3)), (tokens, batch()[1]))


@program(usual=True)
def weights_of_all_stages_made_from_one_vector():
    """A hypernetwork, differentiated through by hand."""

    def step(state, xs, ys):
        def make(z):
            return [{"w": jnp.tanh(z @ h).reshape(WIDTH, WIDTH), "b": z[:WIDTH]} for h in projections]

        projections = [jax.random.normal(k, (6, WIDTH * WIDTH)) / 3 for k in keys(3)]
        params, back = jax.vjp(make, state)
        total, grads = trains(params, (xs, ys))
        return descend(state, back(grads)[0], 0.01), total

    return Case(step, jnp.linspace(-1, 1, 6), batch())


@program()
def weights_normalised_and_masked_before_the_loop():
    """Pruned by magnitude over all layers."""

    def step(state, xs, ys):
        magnitudes = jnp.concatenate([jnp.abs(p["w"]).ravel() for p in state])
        threshold = jnp.sort(magnitudes)[magnitudes.size // 4]
        pruned = [{**p, "w": jnp.where(jnp.abs(p["w"]) > threshold, p["w"], 0)} for p in state]
        total, grads = trains(pruned, (xs, ys))
        return descend(state, grads), (total, threshold)

    return Case(step, weights(3), batch())


@program()
def a_scalar_of_the_weights_used_in_the_loop():
    def step(state, xs, ys):
        scale = 1 / (1 + optax.tree.norm(state))
        total, grads = trains(state, (xs, ys), lambda p, x, y: mse(p, x, y) * scale)
        return descend(state, grads), (total, scale)

    return Case(step, weights(3), batch())


@program()
def results_of_the_loop_with_the_inputs():
    """What was predicted in the loop is compared with the labels after it."""

    def step(state, xs, ys):
        def loss(params, x, y):
            h = mlp(params, x)
            return jnp.mean((h - y) ** 2), h

        (total, outputs), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Concat()), mpmd.Add),
        )
        correlation = jnp.corrcoef(outputs.ravel(), ys.ravel())[0, 1]
        ranks = jnp.argsort(outputs.reshape(-1, WIDTH)[:, 0])
        return descend(state, grads), (total, correlation, ranks, jnp.median(outputs - ys))

    return Case(step, weights(3), batch())


class Scaled:
    """An operation that closes over a value of the step."""

    def __init__(self, scale):
        self.scale = scale

    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype) + 0 * self.scale

    def update(self, state, update, index):
        return state + self.scale * update


@program()
def an_operation_that_closes_over_a_value_of_the_step():
    def step(state, xs, ys):
        params, scale = state
        total, grads = loop(
            lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys), operation=(mpmd.Add, Scaled(scale))
        )
        return (descend(params, grads), scale * 0.9), (total, grads)

    return Case(step, (weights(3), jnp.float32(0.5)), batch())


@program()
def a_loop_under_jit():
    def step(state, xs, ys):
        total, grads = jax.jit(trains)(state, (xs, ys))
        return jax.jit(descend)(state, grads), total

    return Case(step, weights(3), batch())


@program(on_ray=True)
def the_whole_step_under_jit():
    @partial(jax.jit, static_argnames="rate", donate_argnums=0)
    def inner(state, xs, ys, rate):
        total, grads = trains(state, (xs, ys))
        return descend(state, grads, rate), total

    return Case(lambda *args: inner(*args, rate=0.1), weights(3), batch())


@program()
def metadata_and_numbers_of_python_as_auxiliary_output():
    def step(state, xs, ys):
        def loss(params, x, y):
            return mse(params, x, y), {"rows": len(x), "weight": 0.5, "flag": True, "np": np.float32(2)}

        (total, aux), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Concat()), mpmd.Add),
        )
        return descend(state, grads), (total, aux)

    return Case(step, weights(3), batch())


@program()
def losses_of_two_kinds_weighted_by_gradient_norms():
    """Two gradients of one pass, balanced after the loop."""

    def step(state, xs, ys):
        def losses(params, x, y):
            h = mlp(params, x)
            return jnp.stack([jnp.mean((h - y) ** 2), jnp.mean(jnp.abs(h - y))])

        def run(x, y):
            values, back = jax.vjp(lambda p: losses(p, x, y), state)
            (grads,) = back(jnp.array([1.0, 0.5]))
            return values, grads

        values, grads = loop(run, (xs, ys))
        norm = optax.tree.norm(grads)
        return descend(state, grads, 0.1 / (1 + norm)), (values, norm)

    return Case(step, weights(3), batch())


@program()
def two_models_in_one_loop():
    """Each has its own marks' worth of stages: an actor's and a critic's layer a stage."""

    def step(state, xs, ys):
        actor, critic = state

        def loss(both, x, y):
            a, c = x, jnp.concatenate([x, y], -1)[:, :WIDTH]
            for i, (p, q) in enumerate(zip(*both, strict=True)):
                a, c = layer(p, a), layer(q, c)
                if i < 2:
                    a, c = mpmd.mark_stage_end((a, c))
            return jnp.mean((a - jax.lax.stop_gradient(c)) ** 2) + jnp.mean((c - y) ** 2)

        total, (slope, other) = trains((actor, critic), (xs, ys), loss)
        return (descend(actor, slope), descend(critic, other, 0.01)), total

    return Case(step, (weights(3), weights(3)), batch())


@program()
def curriculum_by_the_step():
    """What the loop computes depends on a counter in the state."""

    def step(state, xs, ys):
        params, count = state

        def loss(params, x, y):
            hard = jnp.mean((mlp(params, x) - y) ** 4)
            easy = jnp.mean(jnp.abs(x))
            return jax.lax.cond(count > 0, lambda: hard, lambda: hard * 0.5 + easy)

        total, grads = trains(params, (xs, ys), loss)
        return (descend(params, grads, 0.01), count + 1), total

    return Case(step, (weights(3), 0), batch())


@program()
def a_queue_of_old_features():
    """Momentum contrast: the state holds outputs of earlier steps, of fixed size."""

    def step(state, xs, ys):
        params, queue = state

        def loss(params, x, y):
            h = mlp(params, x)
            return jnp.mean((h @ queue.T) ** 2) + jnp.mean((h - y) ** 2), jax.lax.stop_gradient(h)

        (total, features), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(params, x, y),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Concat()), mpmd.Add),
        )
        queue = jnp.roll(queue, BATCH, 0).at[:BATCH].set(features[-1])
        return (descend(params, grads, 0.01), queue), total

    return Case(step, (weights(3), jnp.ones((2 * BATCH, WIDTH)) / 4), batch())


@program()
def evolution_of_norms_kept_in_the_state():
    """A ring buffer of scalars written at a position that is in the state."""

    def step(state, xs, ys):
        params, history, position = state
        total, grads = trains(params, (xs, ys))
        history = history.at[position % 4].set(optax.tree.norm(grads))
        rate = jnp.where(position > 0, 0.1 / (1 + history.max()), 0.1)
        return (descend(params, grads, rate), history, position + 1), (total, history.mean())

    return Case(step, (weights(3), jnp.zeros(4), jnp.int32(0)), batch())


@program()
def statistics_of_the_batch_as_part_of_the_state():
    def step(state, xs, ys):
        params, mean, count = state
        mean = (mean * count + xs.mean((0, 1))) / (count + 1)
        total, grads = trains(params, (xs - mean, ys))
        return (descend(params, grads), mean, count + 1), total

    return Case(step, (weights(3), jnp.zeros(WIDTH), jnp.float32(0)), batch())


@program()
def updates_of_one_group_that_depend_on_anothers():
    """Layer by layer, each rate follows from the norm of the layer before."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        new, rate = [], 0.1
        for p, g in zip(state, grads, strict=True):
            new.append(descend(p, g, rate))
            rate = 0.1 / (1 + jnp.linalg.norm(new[-1]["w"]))
        return new, (total, rate)

    return Case(step, weights(3), batch())


@program()
def exchanged_weights():
    """Each layer is mixed with its neighbour after the update."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        new = descend(state, grads)
        mixed = [jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, new[i], new[(i + 1) % 3]) for i in range(3)]
        return mixed, total

    return Case(step, weights(3), batch())


@program()
def an_optimizer_that_knows_the_hessian():
    """Kronecker factors from activations and gradients of the loop, solved after it."""

    def step(state, xs, ys):
        def loss(params, x, y):
            h, factors = x, []
            for i, p in enumerate(params):
                factors.append(h.T @ h)
                h = layer(p, h)
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - y) ** 2), jax.lax.stop_gradient(factors)

        (total, factors), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y), (xs, ys)
        )
        damped = [jnp.linalg.inv(f / 16 + jnp.eye(WIDTH)) for f in factors]
        new = [
            {"w": p["w"] - 0.1 * inverse @ g["w"], "b": p["b"] - 0.1 * g["b"]}
            for p, g, inverse in zip(state, grads, damped, strict=True)
        ]
        return new, total

    return Case(step, weights(3), batch())


@program()
def steps_skipped_by_the_batch():
    """Everything, the optimizer's state too, is kept when the batch says so."""

    def step(state, xs, ys, skip):
        params, opt_state = state
        total, grads = trains(params, (xs, ys))

        def update():
            updates, new = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), new

        return jax.lax.cond(skip, lambda: (params, opt_state), update), total

    optimizer = optax.adam(1e-2, eps=1e-3)
    params = weights(3)
    return Case(step, (params, optimizer.init(params)), (*batch(), True))


@program()
def an_update_chosen_by_a_switch():
    def step(state, xs, ys):
        params, count = state
        total, grads = trains(params, (xs, ys))
        rules = [lambda p, g: p - 0.1 * g, lambda p, g: p - 0.01 * jnp.sign(g), lambda p, g: p * 0.99]
        new = jax.tree.map(lambda p, g: jax.lax.switch(count % 3, rules, p, g), params, grads)
        return (new, count + 1), total

    return Case(step, (weights(3), 0), batch())


@program()
def an_update_repeated_by_a_scan():
    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        new = jax.lax.scan(lambda p, _: (descend(p, grads, 0.03), None), state, None, length=3)[0]
        return new, total

    return Case(step, weights(3), batch())


@program()
def a_line_search_over_rates():
    """The update is tried on the last microbatch without marks, until it helps."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))

        def value(rate):
            return jnp.mean((without_marks(descend(state, grads, rate), xs[-1]) - ys[-1]) ** 2)

        rate = jax.lax.while_loop(lambda r: (value(r) > value(0.0)) & (r > 1e-3), lambda r: r / 2, 1.0)
        return descend(state, grads, rate), (total, rate)

    return Case(step, weights(3), batch())


@program()
def sharpness_aware_by_an_ascent_from_the_last_step():
    """The perturbation comes from the last step's gradient, which is in the state."""

    def step(state, xs, ys):
        params, ascent = state
        norm = optax.tree.norm(ascent) + 1e-3
        moved = jax.tree.map(lambda p, a: p + 0.05 * a / norm, params, ascent)
        total, grads = trains(moved, (xs, ys))
        return (descend(params, grads), grads), total

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs[:12]]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)] * 2, f"the state is on {homes}"

    return Case(step, (weights(3), jax.tree.map(jnp.ones_like, weights(3))), batch(), holds=holds)


@program()
def gradients_averaged_with_those_of_the_last_step():
    def step(state, xs, ys):
        params, (older, opt_state) = state
        total, grads = trains(params, (xs, ys))
        mean = jax.tree.map(lambda a, b: (a + b) / 2, grads, older)
        updates, opt_state = SGD.update(mean, opt_state, params)
        return (optax.apply_updates(params, updates), (grads, opt_state)), total

    params = weights(3)
    return Case(step, (params, (jax.tree.map(jnp.zeros_like, params), SGD.init(params))), batch())

"""What happens to the gradients after the loop."""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import mpmd
from tests.support.models import SGD, batch, init, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, train

EPS = 1e-3  # so that gradients near zero do not make Adam's first steps arbitrary
ADAM = optax.adam(1e-2, eps=EPS)
ADAMW = optax.adamw(1e-2, eps=EPS)


def by_path(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "weights" if "'w'" in str(path) else "biases", params
    )


def only_weights(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": ADAM,
    "amsgrad": optax.amsgrad(1e-2, eps=EPS),
    "rmsprop": optax.rmsprop(1e-2, eps=EPS, momentum=0.9),
    "adagrad": optax.adagrad(1e-2),
    "adamax": optax.adamax(1e-2, eps=EPS),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2, eps=EPS),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(1e-2),
    "adafactor, factored": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "novograd": optax.novograd(1e-2, eps=EPS),
    "sm3": optax.sm3(1e-2),
    "yogi": optax.yogi(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "prodigy": optax.contrib.prodigy(1e-1, eps=EPS),
    "schedule free": optax.contrib.schedule_free_sgd(0.1),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), eps=EPS),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), ADAMW),
    "clipped by value": optax.chain(optax.clip(0.01), SGD),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.01), SGD),
    "adaptively clipped": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, momentum=0.9)),
    "normalised": optax.chain(optax.contrib.normalize(), SGD),
    "centralised": optax.chain(optax.centralize(), SGD),
    "noisy": optax.chain(optax.add_noise(0.1, 0.55, 0), SGD),
    "accumulating": optax.MultiSteps(ADAM, 2),
    "skipping what is not finite": optax.apply_if_finite(ADAM, 3),
    "masked decay": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=EPS, mask=only_weights)
    ),
    "masked": optax.masked(optax.adam(1e-2, eps=EPS), only_weights),
    "one rate per kind": optax.multi_transform({"weights": SGD, "biases": ADAM}, by_path),
    "one rate per layer": optax.multi_transform(
        {i: optax.sgd(0.1 / (i + 1)) for i in range(3)},
        lambda params: [jax.tree.map(lambda _, i=i: i, p) for i, p in enumerate(params)],
    ),
    "frozen biases": optax.multi_transform({"weights": ADAM, "biases": optax.set_to_zero()}, by_path),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, eps=EPS),
    "injected schedule": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.01, 4)),
    "averaged updates": optax.chain(SGD, optax.ema(0.9)),
    "jitted": optax.GradientTransformation(ADAM.init, jax.jit(ADAM.update)),
    "flattened": optax.flatten(optax.chain(optax.clip_by_global_norm(0.1), ADAM)),
    "decayed": optax.chain(optax.add_decayed_weights(0.1), SGD),
    "trust ratio": optax.chain(optax.scale_by_trust_ratio(), SGD),
    "factored": optax.chain(optax.scale_by_factored_rms(), optax.scale(-0.01)),
}
USUAL = {"skipping what is not finite", "accumulating", "one rate per kind", "noisy"}


@program(OPTIMIZERS, on_ray={"clipped"}, usual=USUAL)
def trained_with(optimizer):
    def holds(loaded):
        held = [group.parameter_bytes for group in loaded.report().groups]
        # Norms, counters and keys are everywhere; the state of a flattened optimizer is one vector.
        flattened = optimizer is OPTIMIZERS["flattened"]
        assert flattened or max(held) - min(held) <= 128, f"the groups hold {held} bytes"

    return train(mse, weights(3), optimizer=optimizer, holds=holds)


@program()
def lookahead():
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(weights(3))

    def step(state, xs, ys):
        params, opt_state = state
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params.fast, x, y), (xs, ys))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (total, grads)

    return Case(step, (params, optimizer.init(params)), batch())


@program()
def reduce_on_plateau():
    optimizer = optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=0, accumulation_size=1))

    def step(state, xs, ys):
        params, opt_state = state
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        updates, opt_state = optimizer.update(grads, opt_state, params, value=total)
        return (optax.apply_updates(params, updates), opt_state), (total, grads)

    return Case(step, init(weights(3), optimizer), batch())


@program()
def unused_parameter_is_still_decayed():
    optimizer = optax.adamw(1e-2, eps=EPS, weight_decay=0.1)
    return train(lambda p, x, y: mse(p[:2], x, y), weights(3), stages=2, optimizer=optimizer)


@program()
def a_part_of_a_parameter_is_unused():
    """The gradient of the rest is zero."""

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        return jnp.mean((h @ params[1]["w"][:, :2] - y[..., :2]) ** 2)

    return train(loss, weights(2), stages=2, optimizer=ADAMW)


@program()
def norms_as_metrics():
    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        new = descend(state, grads)
        metrics = {
            "loss": total,
            "gradients": optax.tree.norm(grads),
            "parameters": optax.tree.norm(new),
            "updates": optax.tree.norm(jax.tree.map(jnp.subtract, new, state)),
            "layers": jax.tree.map(jnp.linalg.norm, grads),
            "largest": jnp.max(jnp.array([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)])),
        }
        return new, metrics

    return Case(step, weights(3), batch())


@program(usual=True)
def gradients_as_one_vector():
    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        flat, unravel = ravel_pytree(grads)
        flat = jnp.clip(flat, -0.1, 0.1) / jnp.maximum(jnp.linalg.norm(flat), 1.0)
        return descend(state, unravel(flat)), (total, flat)

    return Case(step, weights(3), batch())


@program()
def averaged_parameters():
    def step(state, xs, ys):
        params, average, count = state
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        params = descend(params, grads)
        decay = jnp.minimum(0.99, (1 + count) / (10 + count))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
        return (params, average, count + 1), total

    return Case(step, (weights(3), jax.tree.map(jnp.zeros_like, weights(3)), 0), batch())


@program(["float", "array", "of the step"])
def learning_rates(kind):
    def step(state, xs, ys):
        params, rate, count = state
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        used = rate * 0.5 ** (count // 2) if kind == "of the step" else rate
        return (descend(params, grads, used), rate, count + 1), (total, used)

    return Case(step, (weights(3), jnp.float32(0.1) if kind == "array" else 0.1, 0), batch())


@program()
def noise_on_the_gradients():
    def step(state, xs, ys):
        params, key = state
        key, sub = jax.random.split(key)
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        leaves, treedef = jax.tree.flatten(grads)
        subs = jax.random.split(sub, len(leaves))
        noisy = [g + 0.1 * jax.random.normal(k, g.shape) for g, k in zip(leaves, subs, strict=True)]
        return (descend(params, jax.tree.unflatten(treedef, noisy)), key), total

    return Case(step, (weights(3), jax.random.key(0)), batch())


@program()
def orthogonalised_gradients():
    """An iteration within the optimizer."""

    def newton_schulz(g):
        g = g / (jnp.linalg.norm(g) + 1e-3)
        return jax.lax.fori_loop(0, 3, lambda _, x: 1.5 * x - 0.5 * x @ x.T @ x, g)

    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        grads = jax.tree.map(lambda g: newton_schulz(g) if g.ndim == 2 else g, grads)
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())


@program()
def gradients_compared_across_stages():
    """Large values of one group meet those of another."""

    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        similar = jnp.vdot(grads[0]["w"], grads[2]["w"]) / jnp.linalg.norm(grads[1]["w"])
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *grads)
        return descend(state, grads), (total, similar, stacked, grads[0]["w"] @ grads[1]["w"])

    return Case(step, weights(3), batch())


@program()
def layers_updated_by_a_vmapped_rule():
    """Stacked, updated at once and taken apart again."""

    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        stacked, slopes = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *t) for t in (state, grads))
        new = jax.vmap(lambda p, g: descend(p, g, 0.1 / (1 + jnp.linalg.norm(g["w"]))))(stacked, slopes)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], new) for i in range(3)], total

    return Case(step, weights(3), batch())


@program()
def layers_swapped_after_the_update():
    """What a group gets back is another group's weight."""

    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        return descend(state, grads)[::-1], total

    return Case(step, weights(3), batch())


@program()
def a_parameter_projected_after_the_update():
    def step(state, xs, ys):
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        new = descend(state, grads)
        new[1]["w"] = new[1]["w"] / jnp.maximum(jnp.linalg.norm(new[1]["w"], axis=0), 0.5)
        new[2] = optax.projections.projection_l2_ball(new[2], 1.0)
        return new, total

    return Case(step, weights(3), batch())


@program()
def gradients_by_hand():
    def step(state, xs, ys):
        def run(x, y):
            loss, back = jax.vjp(lambda params: mse(params, x, y), state)
            return loss, back(jnp.float32(128.0))[0]

        total, grads = loop(run, (xs, ys))
        return descend(state, grads, 0.1 / 128), (total, grads)

    return Case(step, weights(3), batch())


@program()
def weights_initialised_in_the_step():
    """Parameters that are no arguments at all."""

    def step(state, xs, ys):
        params = jax.tree.map(lambda p: p * state, weights(3))
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(params, x, y), (xs, ys))
        return state + jnp.mean(grads[0]["w"]), (total, grads)

    return Case(step, jnp.float32(1.0), batch())

"""What may happen inside a stage: rematerialisation, loops, conditions, calls, operations."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import mpmd
from tests.support.models import BATCH, WIDTH, batch, layer, weights
from tests.support.programs.table import Case, descend, program, stages_of, train


def two_layers(params, h):
    h = checkpoint_name(jnp.tanh(h @ params["w"]), "hidden")
    return jnp.tanh(h @ params["w"].T + params["b"])


POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}


@program(POLICIES)
def checkpoint(policy):
    return stages_of(jax.checkpoint(two_layers, policy=policy))


@program()
def checkpoint_of_a_scan_over_layers():
    def stage(params, h):
        def body(h, _):
            return layer(params, h), None

        return jax.lax.scan(jax.checkpoint(body), h, None, length=2)[0]

    return stages_of(stage)


@program({"plain": 1, "unrolled": 2})
def scan_over_layers(unroll):
    def stage(stacked, h):
        return jax.lax.scan(lambda h, p: (layer(p, h), None), h, stacked, unroll=unroll)[0]

    return stages_of(stage, [jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(2)) for _ in range(3)])


@program()
def fori_loop():
    return stages_of(lambda p, h: jax.lax.fori_loop(0, 2, lambda i, h: layer(p, h) * (1 + i), h))


@program()
def while_loop_without_a_gradient():
    def stage(params, h):
        norm = jax.lax.while_loop(
            lambda v: v > 1.0, lambda v: v / 2, jax.lax.stop_gradient(jnp.max(jnp.abs(h)))
        )
        return layer(params, h) * norm

    return stages_of(stage)


@program(["of data", "of the index", "of a parameter"])
def cond(which):
    def step(state, xs, ys):
        def loss(params, i):
            h = xs[i]
            for n, p in enumerate(params):
                predicate = {
                    "of data": h[0, 0] > 0,
                    "of the index": i % 2 == 0,
                    "of a parameter": p["b"][0] > 0,
                }
                h = jax.lax.cond(predicate[which], layer, lambda p, h: h * p["b"], p, h)
                if n < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - ys[i]) ** 2)

        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(state, i), len(xs), mpmd.Std1F1B(3), mpmd.Add
        )
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())


@program()
def a_mark_within_nested_calls_and_scopes():
    @jax.named_call
    def inner(params, h):
        with jax.named_scope("stage"):
            return jax.jit(jax.jit(lambda h: mpmd.mark_stage_end(layer(params, h))))(h)

    def loss(params, x, y):
        return jnp.mean((inner(params[1], inner(params[0], x)) - y) ** 2)

    return train(loss, weights(2), stages=2)


OPERATIONS = {
    "top k": lambda p, h: layer(p, jnp.concatenate([jax.lax.top_k(h, 2)[0]] * 2, -1)),
    "cumulative": lambda p, h: layer(p, jnp.cumsum(h, -1) - jax.lax.cummax(h, axis=1)),
    "associative scan": lambda p, h: layer(p, jax.lax.associative_scan(jnp.multiply, h, axis=1)),
    "convolution": lambda p, h: jnp.tanh(
        jax.lax.conv_general_dilated(h[None, None], p["w"][None, None], (1, 1), "SAME")[0, 0] + p["b"]
    ),
    "pooling": lambda p, h: layer(p, jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME")),
    "fourier transform": lambda p, h: layer(p, jnp.fft.irfft(jnp.fft.rfft(h) * (1 + 1j), n=WIDTH)),
    "linear solve": lambda p, h: layer(p, jnp.linalg.solve(jnp.eye(BATCH) * 3 + h @ h.T, h)),
    "cholesky": lambda p, h: layer(p, jnp.linalg.cholesky(jnp.eye(BATCH) + h @ h.T)),
    "scatter": lambda p, h: layer(p, jnp.zeros_like(h).at[jnp.argmax(h, 0)].add(h, mode="drop")),
    "gather": lambda p, h: jnp.take_along_axis(layer(p, h), jnp.argsort(h, -1), -1),
    "dynamic slice": lambda p, h: layer(
        p, jax.lax.dynamic_slice(jnp.tile(h, 2), (0, jnp.argmax(h[0])), h.shape)
    ),
    "barrier": lambda p, h: layer(p, jax.lax.optimization_barrier(h)),
    "quantised": lambda p, h: h @ (jnp.round(p["w"] * 16).astype(jnp.int8).astype(jnp.float32) / 16) + p["b"],
    "random projection": lambda p, h: layer(p, h @ jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))),
    "complex": lambda p, h: jnp.abs(layer(p, h) * jnp.exp(1j * h)),
}


@program(OPERATIONS)
def stages_with(stage):
    return stages_of(stage)

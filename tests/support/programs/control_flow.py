"""What may happen inside a stage: rematerialisation, loops, conditions, calls, operations."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

import mpmd
from tests.support.models import BATCH, WIDTH, batch, layer, mse, weights
from tests.support.programs.table import Case, descend, loop, program, train


def stages_of(stage, **of_case):
    """Three stages that are ``stage(params, h)`` each."""

    def loss(params, x, y):
        h = x
        for i, p in enumerate(params):
            h = stage(p, h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    return train(loss, weights(3), **of_case)


def two_layers(params, h):
    h = checkpoint_name(jnp.tanh(h @ params["w"]), "hidden")
    return jnp.tanh(h @ params["w"].T + params["b"])


POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "without batch dimensions": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@program(POLICIES, usual={"full", "dots"})
def checkpoint(policy):
    return stages_of(jax.checkpoint(two_layers, policy=policy))


@program()
def checkpoint_without_barriers():
    return stages_of(jax.checkpoint(two_layers, prevent_cse=False))


@program()
def nested_checkpoints():
    return stages_of(jax.checkpoint(lambda p, h: jnp.sin(jax.checkpoint(two_layers)(p, h))))


@program()
def checkpoint_around_some_layers():
    def stage(params, h):
        return layer(params, jax.checkpoint(layer)(params, h))

    return stages_of(stage)


@program()
def checkpoint_with_static_arguments_and_a_closure():
    def stage(params, h):
        run = partial(jax.checkpoint, static_argnums=(1,))(
            lambda h, power: jnp.tanh(h @ params["w"]) ** power
        )
        return run(h, 2) + params["b"]

    return stages_of(stage)


@program()
def checkpoint_of_a_scan_over_layers():
    def stage(params, h):
        def body(h, _):
            return layer(params, h), None

        return jax.lax.scan(jax.checkpoint(body), h, None, length=2)[0]

    return stages_of(stage)


@program({"plain": 1, "unrolled": 2}, usual={"plain"})
def scan_over_layers(unroll):
    def loss(params, x, y):
        h = x
        for i, stacked in enumerate(params):
            h = jax.lax.scan(lambda h, p: (layer(p, h), None), h, stacked, unroll=unroll)[0]
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(2)) for _ in range(3)]
    return train(loss, stacked)


@program()
def one_stack_of_all_layers_cut_into_stages():
    """Each stage scans over its slice of the stack."""

    def loss(params, x, y):
        h = x
        for i in range(3):
            mine = jax.tree.map(lambda leaf, i=i: leaf[2 * i : 2 * i + 2], params)
            h = jax.lax.scan(lambda h, p: (layer(p, h), None), h, mine)[0]
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    return train(loss, jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(6)))


@program()
def recurrence_over_time():
    def stage(params, h):
        def cell(carry, x):
            carry = jnp.tanh(x @ params["w"] + carry + params["b"])
            return carry, carry

        return jax.lax.scan(cell, jnp.zeros(WIDTH), h)[1]

    return stages_of(stage)


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


@program(["of data", "of the index", "of a parameter"], usual={"of data"})
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
def switch():
    def stage(params, h):
        branch = jnp.argmax(jnp.mean(h, 0)) % 3
        return jax.lax.switch(branch, [layer, lambda p, h: h @ p["w"], lambda p, h: h], params, h)

    return stages_of(stage)


@program()
def map_over_examples():
    return stages_of(lambda p, h: jax.lax.map(lambda row: layer(p, row), h))


@program()
def vmap_over_examples():
    return stages_of(lambda p, h: jax.vmap(lambda row: layer(p, row) / (1 + jnp.linalg.norm(row)))(h))


@program()
def collectives_under_vmap():
    """Statistics of the batch, asked for by name."""

    def row(params, h):
        h = layer(params, h)
        return h - jax.lax.pmean(h, "batch")

    return stages_of(jax.vmap(row, in_axes=(None, 0), axis_name="batch"))


@program()
def checked_stages():
    """Errors as values."""

    def checked(params, h):
        checkify.check(jnp.all(h < 100), "too large")
        return layer(params, h)

    return stages_of(lambda params, h: checkify.checkify(checked)(params, h)[1])


@program()
def the_whole_model_under_vmap():
    """Marks are inside."""

    def loss(params, x, y):
        losses = jax.vmap(lambda x, y: mse(params, x[None], y[None]))(x, y)
        return jnp.mean(losses)

    return train(loss, weights(3))


@program()
def gradients_of_every_example():
    def step(state, xs, ys):
        def run(x, y):
            grads = jax.vmap(lambda x, y: jax.grad(mse)(state, x[None], y[None]))(x, y)
            return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1).sum(0), grads)

        grads = loop(run, (xs, ys))
        return descend(state, grads), grads

    return Case(step, weights(3), batch())


@program()
def jit_within_stages():
    return stages_of(jax.jit(lambda p, h: jax.jit(layer)(p, jnp.sin(h))))


@program(usual=True)
def marks_inside_jit():
    @jax.jit
    def stage(params, h):
        return mpmd.mark_stage_end(layer(params, h))

    def loss(params, x, y):
        h = x
        for p in params:
            h = stage(p, h)
        return jnp.mean((h - y) ** 2)

    return train(loss, weights(4), stages=4)


@program()
def the_whole_model_under_jit():
    return train(jax.jit(mse), weights(3))


@program()
def the_gradient_under_jit():
    def step(state, xs, ys):
        total, grads = loop(jax.jit(lambda x, y: jax.value_and_grad(mse)(state, x, y)), (xs, ys))
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
    "sort": lambda p, h: layer(p, jnp.sort(h, -1)),
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
    "segment sum": lambda p, h: layer(p, jax.ops.segment_sum(h, jnp.array([0, 0, 2, 3]), BATCH)),
    "scatter": lambda p, h: layer(p, jnp.zeros_like(h).at[jnp.argmax(h, 0)].add(h, mode="drop")),
    "gather": lambda p, h: jnp.take_along_axis(layer(p, h), jnp.argsort(h, -1), -1),
    "dynamic slice": lambda p, h: layer(
        p, jax.lax.dynamic_slice(jnp.tile(h, 2), (0, jnp.argmax(h[0])), h.shape)
    ),
    "where": lambda p, h: jnp.where(h > 0, jnp.sqrt(jnp.where(h > 0, h, 1.0)), layer(p, h)),
    "einsum": lambda p, h: jnp.einsum("bi,ij,bj->bi", h, p["w"], h) + p["b"],
    "roll and flip": lambda p, h: layer(p, jnp.roll(h, 1, -1) + jnp.flip(h, 0)),
    "weight standardisation": lambda p, h: h @ ((p["w"] - p["w"].mean(0)) / (p["w"].std(0) + 1e-3)) + p["b"],
    "spectral norm": lambda p, h: layer({**p, "w": p["w"] / jnp.linalg.norm(p["w"])}, h),
    "barrier": lambda p, h: layer(p, jax.lax.optimization_barrier(h)),
    "layer norm": lambda p, h: jax.nn.standardize(layer(p, h)) * p["b"],
    "quantised": lambda p, h: h @ (jnp.round(p["w"] * 16).astype(jnp.int8).astype(jnp.float32) / 16) + p["b"],
    "random projection": lambda p, h: layer(p, h @ jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))),
    "lazily made mask": lambda p, h: layer(p, jnp.tril(jnp.ones((BATCH, BATCH))) @ h),
    "integer powers": lambda p, h: layer(p, h**3 / (1 + h**2)),
    "complex": lambda p, h: jnp.abs(layer(p, h) * jnp.exp(1j * h)),
}


@program(
    OPERATIONS,
)
def stages_with(stage):
    return stages_of(stage)

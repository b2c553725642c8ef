"""Models whose layers are one scan over stacked weights, with a mark in its body."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, keys, layer
from tests.support.programs.table import Case, descend, loop, program, train

LAYERS = 6


def stacked(layers=LAYERS, width=WIDTH, dtype=jnp.float32, **others):
    """Weights of ``layers`` layers, stacked along the first axis."""
    (key,) = keys(1)
    w = jax.random.normal(key, (layers, width, width), dtype) / 2
    return {"layers": {"w": w, "b": jnp.full((layers, width), 0.1, dtype)}, **others}


def scanned(body, initial, xs, **options):
    """What a scan over layers carries at the end; ``body`` is without what it stacks."""
    return lax.scan(lambda carry, x: (body(carry, x), None), initial, xs, **options)[0]


def squares(h, y):
    return jnp.mean((h - y) ** 2)


def model(body=None, every=2, **options):
    """A loss whose layers are ``body``, with a mark behind."""
    body = body or (lambda h, p: layer(p, h))

    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(body(h, p), every=every), x, params["layers"], **options)
        return squares(h, y)

    return loss


def in_parts(*paths, parts=3):
    """Asserts that arguments are in parts, on as many groups."""

    def holds(loaded):
        for path in paths:
            found = [leaf for leaf in loaded.plan.inputs if path in leaf.path]
            assert len(found) == parts, [leaf.path for leaf in loaded.plan.inputs]
            assert len({leaf.mpmd_idxs for leaf in found}) == parts, found

    return holds


WEIGHTS = in_parts("[0]['layers']['w'][", "[0]['layers']['b'][")


def no_stack_travels_after_the_loop(loaded):
    """Asserts that an optimizer sends at most what it has computed over all layers: the size of one layer."""
    WEIGHTS(loaded)
    for edge in mpmd.explain(loaded).edges:
        outside = [value for value in edge.values if value.made_by is None or not value.made_by.in_loop]
        large = [value for value in outside if value.aval.nbytes > 4 * WIDTH**2]
        assert not large, large


OPTIMIZERS = {
    "clipped adamw": CLIPPED_ADAM,
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "apply_if_finite": optax.apply_if_finite(CLIPPED_ADAM, 3),
    "muon": optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers={
            "layers": {"w": optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), "b": None}
        },
    ),
    "per leaf": optax.multi_transform(
        {"decayed": optax.adamw(1e-2), "not": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda leaf: "decayed" if leaf.ndim > 2 else "not", params),
    ),
}


@program(OPTIMIZERS)
def scanned_layers_with(optimizer):
    return train(model(), stacked(), optimizer=optimizer, holds=no_stack_travels_after_the_loop)


@program({"one more stage for the head": 4, "head in the last stage": 3})
def embedding_and_head_around_a_scan(stages):
    (key,) = keys(1)
    table = jax.random.normal(key, (7, WIDTH))

    def loss(params, x, y):
        tokens = jnp.int32(jnp.abs(x[:, 0]) * 3) % 7
        h = params["embed"][tokens] + x
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), h, params["layers"])
        return squares(h @ params["head"], y)

    params = stacked(embed=table, head=jnp.eye(WIDTH))
    return train(loss, params, stages, optimizer=CLIPPED_ADAM, holds=WEIGHTS)


REMAT = {
    "full": {},
    "dots without batch": {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
    "no barriers": {"prevent_cse": False},
}


def two_products(p, h):
    return jnp.tanh(jnp.sin(h @ p["w"]) @ p["w"].T + p["b"])


@program(REMAT)
def remat_of_a_whole_loss_with_a_scan(options):
    loss = jax.checkpoint(model(lambda h, p: two_products(p, h)), **options)
    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def remat_within_remat_around_marks():
    def loss(params, x, y):
        inner = jax.checkpoint(lambda p, h: jnp.sin(jax.checkpoint(two_products)(p, h)))
        h = x
        for p in params:
            h = mpmd.mark_stage_end(inner(p, h))
        return squares(h, y)

    params = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked(3)["layers"]) for i in range(3)]
    return train(jax.checkpoint(loss), params)


@program()
def dropout_in_a_scan():
    """Each layer has a key of its own."""

    def loss(params, x, y):
        key = jax.random.fold_in(jax.random.key(3), jnp.int32(x[0, 0] * 1000))

        def body(h, p_key):
            p, own = p_key
            return mpmd.mark_stage_end(layer(p, h) * jax.random.bernoulli(own, 0.8, h.shape), every=2)

        return squares(scanned(body, x, (params["layers"], jax.random.split(key, LAYERS))), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def statistics_of_layers_as_results():
    """The loop's results have one row for each layer, and so are in parts."""

    def body(h, p):
        h = layer(p, h)
        return mpmd.mark_stage_end(h, every=2), (jnp.mean(h, 0), h[0, 0])

    def loss(params, x, y):
        h, statistics = lax.scan(body, x, params["layers"])
        return squares(h, y), statistics

    def step(params, xs, ys):
        grad = jax.value_and_grad(loss, has_aux=True)
        ((value, statistics), grads), largest = loop(
            lambda x, y: (lambda r: (r, r[0][1][1]))(grad(params, x, y)),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Add), mpmd.Max),
        )
        return descend(params, grads), (value, statistics, largest)

    return Case(step, stacked(), batch(), holds=in_parts("['layers']['w']["))


@program()
def a_caches_worth_of_intermediates():
    def step(params, xs, ys):
        def body(h, p):
            h = layer(p, h)
            return mpmd.mark_stage_end(h, every=2), h

        h, cache = loop(lambda x, y: lax.scan(body, x, params["layers"]), (xs, ys), operation=mpmd.Concat(0))
        return params, (h, cache)

    return Case(step, stacked(), batch())

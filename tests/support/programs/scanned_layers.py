"""Models whose layers are one scan over stacked weights, with a mark in its body."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, keys, layer, squares
from tests.support.programs.table import program, train

LAYERS = 6


def stacked(layers=LAYERS, width=WIDTH, **others):
    """Weights of ``layers`` layers, stacked along the first axis."""
    (key,) = keys(1)
    w = jax.random.normal(key, (layers, width, width)) / 2
    return {"layers": {"w": w, "b": jnp.full((layers, width), 0.1, jnp.float32)}, **others}


def scanned(body, initial, xs, **options):
    """What a scan over layers carries at the end; ``body`` is without what it stacks."""
    return lax.scan(lambda carry, x: (body(carry, x), None), initial, xs, **options)[0]


def model(body=None, every=2):
    """A loss whose layers are ``body``, with a mark behind."""
    body = body or (lambda h, p: layer(p, h))

    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(body(h, p), every=every), x, params["layers"])
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


def two_products(p, h):
    return jnp.tanh(jnp.sin(h @ p["w"]) @ p["w"].T + p["b"])


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
def layers_of_two_kinds_in_a_switch():
    """The kind of a layer is a number that is scanned over with its weights."""

    def loss(params, x, y):
        def body(h, inputs):
            p, kind = inputs
            h = lax.switch(kind, [lambda h: layer(p, h), lambda h: h + jnp.sin(layer(p, h))], h)
            return mpmd.mark_stage_end(h, every=2)

        return squares(scanned(body, x, (params["layers"], jnp.arange(LAYERS) % 2)), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)

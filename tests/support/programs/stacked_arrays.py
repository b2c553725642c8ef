"""Scanned layers whose stacked arrays are cut, joined, shared, or read in other ways than by one scan."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, SGD, WIDTH, batch, layer
from tests.support.programs.scanned_layers import (
    LAYERS,
    WEIGHTS,
    in_parts,
    model,
    scanned,
    squares,
    stacked,
)
from tests.support.programs.table import Case, descend, loop, program, train, trains


@program(["list", "expanded", "concatenated"])
def layers_stacked_in_the_loss(kind):
    def loss(params, x, y):
        if kind == "list":
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        elif kind == "expanded":
            layers = jax.tree.map(lambda *leaves: jnp.concatenate([leaf[None] for leaf in leaves]), *params)
        else:
            halves = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *params[i : i + 3]) for i in (0, 3)]
            layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *halves)
        return model()({"layers": layers}, x, y)

    layers = stacked()["layers"]
    params = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(LAYERS)]
    return train(loss, params, optimizer=CLIPPED_ADAM)


@program(["slices", "split", "uneven"])
def several_scans_over_one_stack(kind):
    """The first scan has one stage, the second one two."""

    def loss(params, x, y):
        layers = params["layers"]
        at = 3 if kind == "uneven" else 2
        if kind == "split":
            first, second = (
                jax.tree.map(lambda leaf, i=i: jnp.split(leaf, [2])[i], layers) for i in range(2)
            )
        else:
            first, second = (
                jax.tree.map(lambda leaf, s=s: leaf[s], layers) for s in (slice(at), slice(at, LAYERS))
            )
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), num_stages=1), x, first)
        h = scanned(lambda h, p: mpmd.mark_stage_end(jnp.sin(layer(p, h)), num_stages=2), h, second)
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def one_function_scanned_twice():
    """One jaxpr, whose mark is the same in both calls."""

    @jax.jit
    def run(h, layers):
        return scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=2), h, layers)

    def loss(params, x, y):
        first, second = (
            jax.tree.map(lambda leaf, s=s: leaf[s], params["layers"]) for s in (slice(4), slice(4, 8))
        )
        return squares(run(run(x, first), second), y)

    return train(loss, stacked(8), 4, optimizer=CLIPPED_ADAM, groups=4)


@program(["inner", "outer"])
def nested_scans(kind):
    """Blocks of two layers: a scan over blocks, with the mark, and one over the layers of each."""

    def block(h, p):
        return scanned(lambda h, q: layer(q, h), h, p)

    def loss(params, x, y):
        layers = params["layers"]
        if kind == "inner":
            layers = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), layers)
        return model(block, every=1)({"layers": layers}, x, y)

    params = stacked()
    if kind == "outer":
        params = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), params)
    return train(loss, params, optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def a_map_over_layers():
    """A penalty for each layer, of a map that has no marks."""

    def loss(params, x, y):
        norms = lax.map(lambda p: jnp.sum(jnp.tanh(p["w"]) ** 2), params["layers"])
        return model()(params, x, y) + 0.01 * jnp.sum(norms)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def vmapped_scan():
    def loss(params, x, y):
        return jnp.mean(jax.vmap(model(), in_axes=(None, 0, 0))(params, x, y))

    return train(loss, stacked(), holds=WEIGHTS)


@program()
def one_layer_applied_many_times():
    def loss(params, x, y):
        h = scanned(lambda h, _: mpmd.mark_stage_end(layer(params, h), every=2), x, None, length=LAYERS)
        return squares(h, y)

    return train(loss, {"w": jnp.eye(WIDTH) / 2, "b": jnp.full(WIDTH, 0.1)}, optimizer=CLIPPED_ADAM)


@program()
def depth_dependent_scales():
    """What is scanned over is made of a range, and of a constant with a number for each layer."""
    scale = jnp.linspace(0.5, 1, LAYERS)

    def loss(params, x, y):
        depth = 1 / jnp.sqrt(1.0 + jnp.arange(LAYERS))

        def body(h, inputs):
            p, own, other = inputs
            return mpmd.mark_stage_end(h + layer(p, h) * own * other, every=2)

        return squares(scanned(body, x, (params["layers"], depth, scale)), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program({"encoder": True, "memory": False})
def an_encoder_and_a_decoder(marks_memory):
    """The decoder's layers read what the encoder made."""

    def loss(params, x, y):
        h = scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=3), x, params["encoder"]["layers"])

        def body(carry, p):
            g, memory = carry if marks_memory else (carry, h)
            g = layer(p, g) + memory / 2
            return mpmd.mark_stage_end((g, memory) if marks_memory else g, every=3)

        g = scanned(body, (y, h) if marks_memory else y, params["decoder"]["layers"])
        return squares(g[0] if marks_memory else g, y)

    params = {"encoder": stacked(3), "decoder": stacked(6)}
    return train(loss, params, optimizer=CLIPPED_ADAM)


@program()
def sharded_stacks():
    from jax.sharding import PartitionSpec as P

    specs = {"layers": {"w": P(None, None, "x"), "b": P(None, "x")}}
    return train(
        model(),
        stacked(),
        optimizer=SGD,
        axes={"x": 2},
        options={"in_specs": ((specs, P()), P(None, "x"), P(None, "x"))},
        holds=WEIGHTS,
    )


@program(["slope", "forward"])
def scans_without_a_backward(kind):
    def step(params, xs, ys):
        if kind == "forward":
            return params, loop(lambda x, y: model()(params, x, y), (xs, ys))
        slope = jax.tree.map(jnp.ones_like, params)
        both = loop(lambda x, y: jax.jvp(partial(model(), x=x, y=y), (params,), (slope,)), (xs, ys))
        return params, both

    return Case(step, stacked(), batch(), holds=in_parts("['layers']['w']["))


@program()
def only_the_last_layers_are_trained():
    """The new stack is put together of layers as they were and of trained ones, and keeps its parts."""

    def joined(first, last):
        return jax.tree.map(lambda *both: jnp.concatenate(both), first, last)

    def step(layers, xs, ys):
        frozen, trained = jax.tree.map(lambda a: a[:4], layers), jax.tree.map(lambda a: a[4:], layers)

        def loss(trained, x, y):
            return model()({"layers": joined(frozen, trained)}, x, y)

        value, grads = trains(trained, (xs, ys), loss)
        return joined(jax.tree.map(lambda a: a[:4], layers), descend(trained, grads)), value

    return Case(step, stacked()["layers"], batch(), holds=in_parts("args[0]['w'][", "args[0]['b']["))


@program()
def a_callback_in_a_scan():
    def loss(params, x, y):
        def body(carry, p):
            h, count = carry
            jax.debug.callback(lambda count, mean: None, count, jnp.mean(h))
            return (mpmd.mark_stage_end(layer(p, h), every=2), count + 1)

        h, _ = scanned(body, (x, 0), params["layers"])
        return squares(h, y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)

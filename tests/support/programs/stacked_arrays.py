"""Scanned layers whose arrays are cut, joined, shared or read in other ways, and carried integers."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, descend, layer, rows, squares
from tests.support.programs.scanned_layers import LAYERS, WEIGHTS, in_parts, model, scanned, stacked
from tests.support.programs.table import Case, loop, program, train, trains


@program()
def several_scans_over_one_stack():
    """The first scan has one stage, the second one two."""

    def loss(params, x, y):
        first, second = (rows(params["layers"], part) for part in (slice(2), slice(2, LAYERS)))
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
        first, second = (rows(params["layers"], part) for part in (slice(4), slice(4, 8)))
        return squares(run(run(x, first), second), y)

    return train(loss, stacked(8), 4, optimizer=CLIPPED_ADAM)


@program(["inner", "outer"])
def nested_scans(kind):
    """Blocks of two layers: a scan over blocks, with the mark, and one over the layers of each."""

    def block(h, p):
        return scanned(lambda h, q: layer(q, h), h, p)

    def blocks(params):
        return jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), params)

    def loss(params, x, y):
        return model(block, every=1)(blocks(params) if kind == "inner" else params, x, y)

    params = stacked() if kind == "inner" else blocks(stacked())
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
        frozen, trained = rows(layers, slice(4)), rows(layers, slice(4, None))

        def loss(trained, x, y):
            return model()({"layers": joined(frozen, trained)}, x, y)

        value, grads = trains(trained, (xs, ys), loss)
        return joined(frozen, descend(trained, grads)), value

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


@program()
def a_network_with_skips_from_scan_to_scan():
    """As of a U-ViT: the layers of the second scan read what those of the first one made, in reverse."""

    def loss(params, x, y):
        def down(h, p):
            h = layer(p, h)
            return mpmd.mark_stage_end(h, every=2), h

        def up(h, inputs):
            p, skip = inputs
            return mpmd.mark_stage_end(layer(p, h + skip), every=2), None

        h, made = lax.scan(down, x, params["down"])
        h, _ = lax.scan(up, h, (params["up"], made[::-1]))
        return squares(h, y)

    params = {"down": stacked(4)["layers"], "up": jax.tree.map(jnp.sin, stacked(4)["layers"])}
    holds = in_parts("[0]['down']['w'][", "[0]['up']['w'][", parts=2)
    return train(loss, params, 4, optimizer=CLIPPED_ADAM, holds=holds)


@program()
def classes_of_all_layers():
    """Each layer has a head, and the loss is a mean over the layers of what these say of the classes."""

    def loss(params, x, y):
        def body(h, p):
            own, head = p
            h = layer(own, h)
            return mpmd.mark_stage_end(h, every=2), h @ head

        _, logits = lax.scan(body, x, (params["layers"], params["heads"]))
        labels = jnp.argmax(y, -1)
        of_layers = jax.vmap(lambda one: optax.softmax_cross_entropy_with_integer_labels(one, labels))(logits)
        return jnp.mean(jnp.linspace(0.5, 1.0, LAYERS)[:, None] * of_layers)

    params = stacked() | {"heads": jnp.ones((LAYERS, WIDTH, 5)) * jnp.linspace(-1.0, 1.0, 5)}
    return train(loss, params, optimizer=CLIPPED_ADAM, holds=in_parts("[0]['layers']['w'][", "[0]['heads']["))


@program()
def scales_from_a_history_of_each_layer():
    """As of 8-bit floats: the largest inputs of the last steps say how each layer scales its own."""

    def step(state, xs, ys):
        params, history = state
        scales = jnp.max(history, 1)

        def loss(params, x, y):
            def body(h, inputs):
                p, scale = inputs
                rounded = h + lax.stop_gradient(jnp.round(h / scale * 16) / 16 * scale - h)
                return mpmd.mark_stage_end(layer(p, rounded), every=2), jnp.max(jnp.abs(h))

            h, largest = lax.scan(body, x, (params["layers"], scales))
            return squares(h, y), lax.stop_gradient(largest)

        (value, largest), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(params, x, y),
            (xs, ys),
            operation=((mpmd.Add, mpmd.Max), mpmd.Add),
        )
        history = jnp.roll(history, 1, axis=1).at[:, 0].set(largest)
        return (descend(params, grads), history), value

    state = stacked(), jnp.ones((LAYERS, 4))
    return Case(step, state, batch(), holds=in_parts("[0]['layers']['w'][", "args[0][1]["))

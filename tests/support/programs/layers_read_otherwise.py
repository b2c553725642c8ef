"""Scanned layers that are read in reverse, in turns, or by an index into what each of them has."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, layer
from tests.support.programs.scanned_layers import LAYERS, WEIGHTS, in_parts, scanned, squares, stacked
from tests.support.programs.table import Case, descend, loop, program, train


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
    return train(loss, params, 4, optimizer=CLIPPED_ADAM, groups=4, holds=holds)


@program()
def layers_in_reverse():
    def loss(params, x, y):
        layers = jax.tree.map(lambda leaf: leaf[::-1], params["layers"])
        return squares(scanned(lambda h, p: mpmd.mark_stage_end(layer(p, h), every=(1, 3, 2)), x, layers), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


@program()
def layers_in_turns():
    """Each iteration has two layers of one stack."""

    def loss(params, x, y):
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i::2], params["layers"]) for i in range(2)]

        def body(h, both):
            return mpmd.mark_stage_end(jnp.sin(layer(both[1], layer(both[0], h))))

        return squares(scanned(body, x, tuple(layers)), y)

    return train(loss, stacked(), optimizer=CLIPPED_ADAM, holds=WEIGHTS)


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

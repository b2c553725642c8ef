"""Scanned layers as model libraries write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, drawn, drawn_like, squares
from tests.support.programs.scanned_layers import LAYERS
from tests.support.programs.table import program, train


class Block(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, h, _):
        h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(h))))
        return mpmd.mark_stage_end(h, every=2), None


class Model(nn.Module):
    axis: int
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS
        )
        h, _ = layers(name="layers")(nn.Dense(WIDTH)(x), None)
        return nn.Dense(WIDTH)(nn.LayerNorm()(h))


@program(
    {"axis 0": (0, False), "axis 1": (1, False), "remat": (0, True), "remat, axis 1": (1, True)},
)
def flax_linen_scan(kind):
    module = Model(*kind)

    def loss(params, x, y):
        return squares(module.apply(params, x), y)

    params = drawn(module.init, jax.random.key(0), batch()[0][0])
    return train(loss, params, optimizer=optax.adamw(1e-2))


@program()
def flax_nnx_scan():
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, h):
            return h + jnp.tanh(self.linear(self.norm(h)))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Layer(rngs)

    graph, params = nnx.split(make(nnx.Rngs(0)))

    def loss(params, x, y):
        layers = nnx.merge(graph, params)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(h, one):
            return mpmd.mark_stage_end(one(h), every=2)

        return squares(run(x, layers), y)

    return train(loss, params, optimizer=CLIPPED_ADAM)


@program()
def equinox_scanned_modules():
    import equinox as eqx

    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key))
    layers = eqx.filter_eval_shape(make, jax.random.split(jax.random.key(0), LAYERS))
    shapes, static = eqx.partition(layers, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    params = drawn_like(shapes)

    def loss(params, x, y):
        def body(h, p):
            one = eqx.combine(p, static)
            return mpmd.mark_stage_end(h + jax.vmap(one)(h), every=2), None

        h, _ = lax.scan(body, x, params)
        return squares(h, y)

    return train(loss, params, optimizer=CLIPPED_ADAM)


@program()
def haiku_layer_stack():
    import haiku as hk

    def forward(x):
        def one(h):
            return h + jnp.tanh(hk.Linear(WIDTH)(h))

        def marked(h):
            return mpmd.mark_stage_end(hk.remat(one)(h), every=2)

        return hk.layer_stack(LAYERS)(marked)(x)

    network = hk.without_apply_rng(hk.transform(forward))
    params = drawn(network.init, jax.random.key(0), batch()[0][0])
    return train(lambda params, x, y: squares(network.apply(params, x), y), params, optimizer=CLIPPED_ADAM)

"""Which layers are found in functions of many kinds."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from mpmd.compiler.find_layers.even_stages import even_stages
from mpmd.compiler.find_layers.find_layers import find_layers, opened_for_layers
from mpmd.compiler.find_layers.pieces import best_pieces
from mpmd.compiler.find_layers.repeats import Repeat, find_runs
from mpmd.compiler.jaxprs.equations import is_remat
from tests.support.models import squares

WIDTH = 32


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def layers_of(fun, *args):
    """The layers of a function, and its equations."""
    jaxpr = opened_for_layers(jax.make_jaxpr(fun)(*args)).jaxpr
    layers = find_layers(jaxpr)
    assert layers[0].start.equation == 0 and layers[-1].end.equation == len(jaxpr.eqns)
    assert all(left.end == right.start for left, right in itertools.pairwise(layers))
    assert len(layers) == 1 or all(layer.start < layer.end for layer in layers)
    return layers, jaxpr


def products_of(layers, jaxpr):
    """For each layer, how many products it has."""
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    return [names[layer.start.equation : layer.end.equation].count("dot_general") for layer in layers]


def shares(layers):
    total = sum(layer.work for layer in layers)
    return [layer.work / total for layer in layers]


def dense(p, x):
    return jax.nn.relu(x @ p["w"] + p["b"])


def dense_weights(*widths):
    return [{"w": shape(a, b), "b": shape(b)} for a, b in itertools.pairwise(widths)]


def mlp(params, x):
    for p in params:
        x = dense(p, x)
    return jnp.mean(x**2)


def block(p, x, mask):
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    attended = jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v
    x = x + attended @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def block_weights(d=WIDTH):
    return {"qkv": shape(d, 3 * d), "out": shape(d, d), "up": shape(d, 4 * d), "down": shape(4 * d, d)}


def transformer(params, tokens, remat=None):
    mask = jnp.tril(jnp.ones((tokens.shape[-1],) * 2, bool))
    x = params["words"][tokens] + params["positions"]
    for p in params["blocks"]:
        x = (jax.checkpoint(block) if remat == "blocks" else block)(p, x, mask)
    return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))


def transformer_weights(num_blocks, words=256):
    return {
        "words": shape(words, WIDTH),
        "positions": shape(8, WIDTH),
        "blocks": [block_weights()] * num_blocks,
        "head": shape(WIDTH, words),
    }


TOKENS = shape(2, 8, dtype=jnp.int32)


def test_equal_dense_layers_are_a_layer_each():
    layers, jaxpr = layers_of(mlp, dense_weights(*[WIDTH] * 9), shape(8, WIDTH))
    assert products_of(layers, jaxpr) == [1] * 8
    assert {layer.leaving for layer in layers[:-1]} == {8 * WIDTH * 4}


@pytest.mark.parametrize("blocks", [2, 6])
def test_blocks_stay_whole(blocks):
    layers, jaxpr = layers_of(transformer, transformer_weights(blocks), TOKENS)
    assert products_of(layers, jaxpr) == [6] * blocks + [1]
    assert {layer.leaving for layer in layers[:-1]} == {2 * 8 * WIDTH * 4}, "more than the blocks' results"


def test_a_small_head_is_in_the_last_layer():
    layers, jaxpr = layers_of(transformer, transformer_weights(6, words=2), TOKENS)
    assert products_of(layers, jaxpr) == [6] * 5 + [7]


def test_a_large_head_is_one_layer():
    """Nothing ends between the scores of all words and their sum."""
    layers, _ = layers_of(transformer, transformer_weights(4, words=8192), TOKENS)
    assert len(layers) == 5
    assert shares(layers)[-1] > 0.5


def test_blocks_under_checkpoint_are_layers():
    layers, jaxpr = layers_of(lambda p, t: transformer(p, t, "blocks"), transformer_weights(6), TOKENS)
    are_remat = [is_remat(eqn) for eqn in jaxpr.eqns]
    found = [sum(are_remat[layer.start.equation : layer.end.equation]) for layer in layers]
    assert found == [1] * 6 + [0]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fun: jax.jit(jax.checkpoint(jax.jit(fun)))])
def test_layers_within_calls_are_found(wrap):
    plain, _ = layers_of(transformer, transformer_weights(6), TOKENS)
    wrapped, _ = layers_of(wrap(transformer), transformer_weights(6), TOKENS)
    assert [layer.work for layer in wrapped] == [layer.work for layer in plain]


def scanned(params, x, y):
    def body(carry, p):
        h, count = carry
        return (dense(p, h), count + 1), jnp.mean(h)

    (h, _), means = lax.scan(body, (params["in"] @ x, 0), params["layers"])
    return squares(h @ params["out"], y) + jnp.sum(means)


def scanned_weights(layers):
    d = WIDTH
    stack = {"w": shape(layers, d, d), "b": shape(layers, d)}
    return {"in": shape(8, 8), "layers": stack, "out": shape(d, d)}


def test_iterations_of_a_scan_are_layers():
    args = scanned_weights(5), shape(8, WIDTH), shape(8, WIDTH)
    layers, jaxpr = layers_of(scanned, *args)
    (scan,) = (i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan")
    within = [layer.end.iterations for layer in layers if layer.end.equation == scan]
    assert within in ([1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_a_call_with_a_number_within_a_layer():
    """The number is an operand of the call, as of ``jnp.clip`` or ``jax.nn.standardize``, and no variable."""

    def loss(params, x, y):
        h, _ = lax.scan(lambda h, w: (w @ jnp.clip(h, -1.0, 1.0), None), x, params)
        return squares(h, y)

    args = shape(5, WIDTH, WIDTH), shape(WIDTH, 8), shape(WIDTH, 8)
    layers, _ = layers_of(loss, *args)
    assert len(layers) >= 5


def test_scans_over_time_are_none_of_layers():
    def recurrent(params, x):
        for p in params:
            _, x = lax.scan(lambda h, x, p=p: 2 * (jnp.tanh(x @ p["w"] + h @ p["w"]),), jnp.zeros(WIDTH), x)
        return jnp.mean(x)

    layers, _ = layers_of(recurrent, dense_weights(*[WIDTH] * 4), shape(100, WIDTH))
    assert len(layers) == 3
    assert not any(layer.end.iterations for layer in layers)


def test_two_towers_of_different_widths():
    def towers(params, x, y):
        for p in params["x"]:
            x = dense(p, x)
        for p in params["y"]:
            y = dense(p, y)
        return jnp.mean(jax.nn.logsumexp(x @ y.T, -1))

    params = {"x": dense_weights(*[32] * 4), "y": dense_weights(64, 64, 64, 64, 32)}
    layers, jaxpr = layers_of(towers, params, shape(8, 32), shape(8, 64))
    assert sum(products_of(layers, jaxpr)) == 8
    assert max(products_of(layers, jaxpr)) <= 2


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        kept = []
        for width in (8, 16, 32):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            kept.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        for width in (32, 16, 8):
            x = jnp.concatenate([nn.ConvTranspose(width, (2, 2), (2, 2))(x), kept.pop()], -1)
            x = nn.relu(nn.Conv(width, (3, 3))(x))
        return nn.Conv(1, (1, 1))(x).mean()


def test_a_network_with_skips_is_in_even_parts():
    x = shape(2, 16, 16, 3)
    params = jax.eval_shape(UNet().init, jax.random.key(0), x)
    layers, _ = layers_of(UNet().apply, params, x)
    assert len(layers) >= 6
    assert max(shares(layers)) < 0.3


def test_masks_and_casts_are_not_handed_over():
    def fun(params, tokens, key):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        mask = (tokens[:, None, :] > 0) & jnp.tril(jnp.ones((8, 8), bool))
        x = params["words"][tokens]
        for i, p in enumerate(params["blocks"]):
            x = block(p, x, mask) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        return jnp.mean(x)

    layers, _ = layers_of(fun, transformer_weights(5), TOKENS, jax.eval_shape(lambda: jax.random.key(0)))
    assert len(layers) == 5
    assert {layer.leaving for layer in layers[:-1]} == {2 * 8 * WIDTH * 2}


def test_what_a_closure_has_is_an_input():
    mask = np.tril(np.ones((8, 8), bool))

    def fun(params, tokens):
        x = params["words"][tokens]
        for p in params["blocks"]:
            x = block(p, x, jnp.logical_not(mask))
        return jnp.mean(x)

    layers, _ = layers_of(fun, transformer_weights(4), TOKENS)
    assert {layer.leaving for layer in layers[:-1]} == {2 * 8 * WIDTH * 4}


@pytest.mark.parametrize(
    "fun", [jnp.sum, lambda x: 1.0, lambda x: lax.while_loop(lambda x: x[0] < 1, dense_once, x)]
)
def test_what_cannot_be_cut_is_one_layer(fun):
    layers, _ = layers_of(fun, shape(4))
    assert len(layers) == 1


def dense_once(x):
    return jnp.ones((4, 4)) @ x


def test_a_block_and_not_its_half_repeats():
    """Blocks end where one value is handed over, not between their halves, where it is two."""
    tokens = [0, *[1, 2, 1, 2, 3] * 4, 4]
    crossing = [None, *[1, 2, 2, 2, 2] * 4, 1, None]
    assert find_runs(tokens, [1.0] * 22, crossing) == [Repeat(1, 5, 4)]
    assert find_runs([1, 2, 1, 2], [1.0] * 4, [1] * 5) == [Repeat(0, 2, 2)]


def test_repetitions_of_several_kinds():
    tokens = [1, 2] * 5 + [3, 4, 5] * 5
    found = find_runs(tokens, [1.0] * 25, [1] * 26)
    assert [(run.period, run.count) for run in found] == [(2, 5), (3, 5)]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.data())
def test_stages_are_as_even_as_they_can_be(work, data):
    num_stages = data.draw(st.integers(1, len(work)))
    found = even_stages(work, [1] * len(work), num_stages)
    assert len(found) == num_stages and sum(found) == len(work) and min(found) > 0
    assert largest(work, found) <= 1.05 * min(
        largest(work, np.diff([0, *ends, len(work)]))
        for ends in itertools.combinations(range(1, len(work)), num_stages - 1)
    ) * (1 + 1e-9)


def largest(work, counts):
    ends = [0, *itertools.accumulate(counts)]
    return max(sum(work[a:b]) for a, b in itertools.pairwise(ends))


def test_equal_layers_make_equal_stages():
    assert sorted(even_stages([1.0] * 30, [1] * 30, 4)) == [7, 7, 8, 8]
    assert even_stages([1, 1, 1, 1, 2], [4] * 5, 3) == (2, 2, 1)


def test_stages_end_where_less_is_handed_over():
    assert even_stages([1.0] * 5, [9, 9, 1, 9, 9], 2) == (3, 2)
    assert even_stages([1.0] * 5, [9, 1, 9, 9, 9], 2) == (2, 3)


def test_where_no_value_is_handed_over_no_piece_ends():
    assert best_pieces([4.0], [None, None], 1.0, None) == []

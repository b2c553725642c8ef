"""Weights that several stages use: one logical weight, whose gradients add up."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from mpmd.ir.plan import Run
from tests.support.models import BATCH, MICROBATCHES, WIDTH, keys, layer, mse, squares, weights
from tests.support.programs.stages import homes
from tests.support.programs.table import program, train

VOCABULARY = 5


def tokens_of(x):
    return jnp.int32(x[..., 0] > 0) + 2 * jnp.int32(x[..., 1] > 0)


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def language_model(params, x, y):
    """The embedding's table is used by the first and, transposed, by the last of three stages."""
    h = mpmd.mark_stage_end(params["table"][tokens_of(x)])
    h = mpmd.mark_stage_end(layer(params["layers"][0], h))
    return cross_entropy(layer(params["layers"][1], h) @ params["table"].T, tokens_of(y))


def tied():
    return {"table": jax.random.normal(keys(1)[0], (VOCABULARY, WIDTH)), "layers": weights(2)}


def accumulators(loaded, like):
    """Counts the sums of the shape and dtype of an argument that the groups' backwards update."""
    (aval,) = (leaf.aval for leaf in loaded.plan.inputs if leaf.path == like)
    found = set()
    for group in loaded.plan.programs:
        for run in group.instructions:
            if isinstance(run, Run) and run.label.startswith("bwd") and run.label.endswith("__0"):
                executable = loaded.plan.executable(run.executable)
                states = zip(run.inputs, executable.inputs, strict=True)
                found |= {name for name, of in states if of == aval and name.startswith("before")}
    return len(found)


@program()
def tied_embeddings_in_half_precision():
    """The parameters are cast in the loss: gradients of the table's size are not sent every microbatch."""

    def loss(params, x, y):
        return language_model(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x, y).astype(
            jnp.float32
        )

    def holds(loaded):
        activation, table = BATCH * WIDTH * 2, VOCABULARY * WIDTH * 4
        sent = sum(group.sent_bytes for group in loaded.report().groups)
        assert sent <= 4 * MICROBATCHES * activation + 2 * table, f"sends {sent} bytes"

    return train(loss, tied(), tolerance=2e-2, holds=holds)


@program()
def shared_weights_on_the_same_group():
    """Stages 0 and 2 share, and both are on group 0."""

    def loss(params, x, y):
        return mse([params[0], params[1], params[0], params[2]], x, y)

    def holds(loaded):
        assert homes(loaded, "args[0][0][0]['w']") == [(0,)]

    return train(loss, weights(3), schedule=mpmd.Interleaved1F1B(4, 2), holds=holds)


@program()
def a_weight_used_twice_in_one_stage():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], layer(params[0], x)))
        return squares(layer(params[1], jnp.sin(layer(params[1], h))), y)

    def holds(loaded):
        assert accumulators(loaded, "args[0][0][0]['w']") == 2, "a weight has more than one accumulator"

    return train(loss, weights(2), stages=2, holds=holds)


@program()
def a_weight_with_a_penalty_whose_gradient_comes_from_a_later_stage():
    """The penalty's gradient is where the weight is, in the first stage; the other summand is made later."""

    def loss(params, x, y):
        scaled = x * params["scale"]
        h = mpmd.mark_stage_end(jax.lax.stop_gradient(jnp.tanh(scaled)))
        return squares(h + scaled, y) + 0.01 * jnp.sum(params["scale"] ** 2)

    return train(loss, {"scale": jnp.linspace(0.5, 1.5, WIDTH)}, stages=2)

"""Models without marks, whose layers ``mpmd.auto_marks`` finds."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from mpmd.language.decisions import Decisions, decided
from mpmd.language.remat import Remat
from tests.support.models import (
    BATCH,
    CLIPPED_ADAM,
    MICROBATCHES,
    WIDTH,
    descend,
    keys,
    layer,
    squares,
    unmarked,
    weights,
)
from tests.support.programs.scanned_layers import in_parts, stacked
from tests.support.programs.table import Case, loop, program, train

WORDS = 8


def words():
    """Microbatches of numbers of words, and of what is to follow them."""
    drawn = jax.random.randint(keys(1)[0], (MICROBATCHES, BATCH, 5), 0, WORDS)
    return drawn, (drawn + 1) % WORDS


def table(*shape):
    return jax.random.normal(keys(2)[1], shape) / 2


def word_loss(scores, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[..., None], -1))


def forwards(count):
    """Asserts that each group has a forward, and that activations are all that it sends."""

    def holds(loaded):
        groups = loaded.report().groups
        assert len(groups) == count and all(group.sent_bytes for group in groups), groups

    return holds


@program([2, 3])
def dense_layers(stages):
    def loss(params, x, y):
        return squares(unmarked(params, x), y)

    return train(
        mpmd.auto_marks(loss, stages), weights(6), stages, optimizer=CLIPPED_ADAM, holds=forwards(stages)
    )


def language_model(params, x, y):
    """A scan over layers, with an embedding before and a head behind it."""
    h, _ = lax.scan(lambda h, p: (layer(p, h), None), params["words"][x], params["layers"])
    return word_loss(h @ params["head"], y)


def scanned_words():
    return stacked(6, 32, words=table(WORDS, 32), head=table(32, WORDS))


@program(["plain", "rematerialised", "under jax.checkpoint"])
def scanned_between_embedding_and_head(how):
    loss = jax.checkpoint(language_model) if how == "under jax.checkpoint" else language_model
    case = train(
        mpmd.auto_marks(loss, 3), scanned_words(), data=words(), holds=in_parts("['layers']['w'][", parts=3)
    )
    if how == "rematerialised":
        return dataclasses.replace(case, step=decided(case.step, Decisions(remat=(Remat.NOTHING_SAVEABLE,))))
    return case


@program()
def stages_that_end_within_two_scans():
    def loss(params, x, y):
        def encoded(h, p):
            return layer(p, h), None

        def decoded(h, p):
            return layer(p, h) + memory, jnp.mean(h)

        memory, _ = lax.scan(encoded, x, params["encoder"])
        h, means = lax.scan(decoded, y, params["decoder"], reverse=True)
        return squares(h, y) + jnp.sum(means)

    params = {"encoder": stacked(4)["layers"], "decoder": stacked(5)["layers"]}
    return train(mpmd.auto_marks(loss, 4), params, 4)


@program()
def words_masks_dropout_and_aux():
    """Integers, keys and masks cross stages without being sent; what layers report is returned."""

    def loss(params, x, y, key, rate=0.25):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        mask = (x > 0)[..., None]
        h = params["words"][x]
        norms = []
        for p, k in zip(params["layers"], jax.random.split(key, 4), strict=True):
            keep = jax.random.bernoulli(k, 1 - rate, h.shape)
            h = h + jnp.where(keep & mask, layer(p, h), 0)
            norms.append(jnp.linalg.norm(h.astype(jnp.float32)))
        scores = (h @ params["words"].T).astype(jnp.float32)
        return word_loss(scores, y), {"norms": norms, "right": jnp.sum(scores.argmax(-1) == y), "rate": rate}

    def step(params, x, y, key):
        found = mpmd.auto_marks(loss, num_stages=3)

        def fun(x, y, key):
            (value, aux), grads = jax.value_and_grad(found, has_aux=True)(params, x, y, key, rate=0.5)
            return (value, grads), {name: aux[name] for name in ("norms", "right")}

        (value, grads), aux = loop(fun, (x, y, key), operation=(mpmd.Add, mpmd.Concat()))
        return descend(params, grads), (value, aux)

    params = {"words": table(WORDS, WIDTH), "layers": weights(4)}
    return Case(step, params, (*words(), jax.random.split(jax.random.key(1), MICROBATCHES)), tolerance=2e-2)

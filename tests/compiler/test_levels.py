"""What each pass makes of a small step, as text.

After a change that is wanted, ``pytest tests/compiler/test_levels.py --force-regen`` writes the texts anew.
Read the difference as carefully as the code.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpmd
from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.place import place
from mpmd.compiler.shard import shard
from mpmd.compiler.split import split
from tests.support.levels import SUBMESHES, submeshes, traced_step, without_shardings
from tests.support.models import planned


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def two_layers(weights, x):
    """One cheap equation and one that is not, on each side of the mark."""
    h = lax.sin(lax.dot(x, weights["first"]))
    h = mpmd.mark_stage_end(h, name="hidden")
    return jnp.sum(lax.mul(lax.dot(h, weights["last"]), weights["scale"]))


def gradients(loss, weights, xs, schedule):
    return mpmd.treduce(
        lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule, operation=mpmd.Add
    )


def sgd(weights, grads):
    return jax.tree.map(lambda w, g: lax.sub(w, lax.mul(g, lax.full_like(g, 0.5))), weights, grads)


def plain(weights, xs):
    """Stochastic gradient descent."""
    loss, grads = gradients(two_layers, weights, xs, mpmd.Std1F1B(2))
    return sgd(weights, grads), loss


WEIGHTS = {"first": array(3, 4), "last": array(4, 2), "scale": array(5, 2)}
XS = array(2, 5, 3)


def cut(step, *args):
    return cut_layers(traced_step(step, *args))


def replicated(cut):
    """The graph of a cut step, with the specs and placements of one of which nothing is asked."""
    specs = without_shardings(cut)
    return place(shard(split(cut), SUBMESHES, specs), SUBMESHES, specs, {})


def placed(step, *args):
    return replicated(cut(step, *args))


def with_metrics(state, xs):
    """A call, dead code, a value that the step closes over, results without an equation, and the state."""
    table = np.arange(3, dtype=np.float32)

    @jax.jit
    def shifted(x):
        return lax.add(x, lax.broadcast_in_dim(table, (2, 5, 3), (2,)))

    lax.cos(xs)  # nobody reads it
    weights, count = state
    loss, grads = gradients(two_layers, weights, shifted(xs), mpmd.Std1F1B(2))
    return (sgd(weights, grads), lax.add(count, jnp.int32(1))), {"loss": loss, "one": 1.0, "xs": xs}


def scanned(weights, xs):
    """Four layers in a scan, of which two are a stage."""

    def layer(h, w):
        return mpmd.mark_stage_end(lax.sin(lax.dot(h, w)), name="block", every=2), None

    def loss(weights, x):
        return jnp.sum(lax.scan(layer, x, weights["layers"])[0])

    loss_value, grads = gradients(loss, weights, xs, mpmd.Std1F1B(2))
    return sgd(weights, grads), loss_value


STEPS = {
    "plain": (with_metrics, (WEIGHTS, array(dtype=jnp.int32)), XS),
    "scanned": (scanned, {"layers": array(4, 3, 3)}, XS),
}


@pytest.mark.parametrize("name", STEPS)
def test_trace(file_regression, name):
    file_regression.check(str(traced_step(*STEPS[name])))


@pytest.mark.parametrize("name", STEPS)
def test_cut_layers(file_regression, name):
    file_regression.check(str(cut(*STEPS[name])))


def two_loops(weights, xs):
    """The second loop reads what the first one's gradients have made of the weights."""
    first, grads = gradients(two_layers, weights, xs, mpmd.Std1F1B(2))
    weights = sgd(weights, grads)
    last, grads = gradients(two_layers, weights, xs[:1], mpmd.GPipe(2))
    return sgd(weights, grads), lax.add(first, last)


def test_cut_layers_two_loops(file_regression):
    file_regression.check(str(cut(two_loops, WEIGHTS, XS)))


def test_place_two_loops(file_regression):
    file_regression.check(str(placed(two_loops, WEIGHTS, XS)))


@pytest.mark.parametrize("schedule", [mpmd.Std1F1B(2), mpmd.ZeroBubble(2)], ids=lambda s: s.name)
def test_split(file_regression, schedule):
    """A microbatch's slice that two stages read, a tied weight, residuals, and the halves of backwards."""

    def tied(weights, x):
        h = mpmd.mark_stage_end(lax.sin(lax.dot(x, weights["tied"])))
        h = lax.add(lax.dot(h, weights["tied"]), lax.neg(x))
        return jnp.sum(lax.mul(h, h))

    def step(weights, xs):
        loss, grads = gradients(tied, weights, xs, schedule)
        return sgd(weights, grads), loss

    file_regression.check(str(split(cut(step, {"tied": array(3, 3)}, XS))))


@pytest.mark.parametrize("gather", ["task", "step"])
def test_shard(file_regression, gather):
    """A gradient and a loss in parts, and a weight with an axis of its own, which may be gathered."""

    def loss(weights, x):
        h = mpmd.mark_stage_end(lax.sin(lax.dot(x, weights["first"])))
        return jnp.sum(lax.dot(h, weights["last"]))

    def step(weights, xs):
        loss_value, grads = gradients(loss, weights, xs, mpmd.Std1F1B(2))
        return sgd(weights, grads), loss_value

    weights = {"first": array(3, 4), "last": array(4, 2)}
    meshes = submeshes(2, data=2)
    graph = split(cut_layers(traced_step(step, weights, array(2, 6, 3), submeshes=meshes)))
    specs = dataclasses.replace(without_shardings(graph.step), arguments=((), ("data",), (None, "data")))
    file_regression.check(str(shard(graph, meshes, specs, gather=gather)))


def test_place(file_regression):
    """A norm over the gradients of all groups, which each group computes for itself."""

    def step(weights, xs):
        loss, grads = gradients(two_layers, weights, xs, mpmd.Std1F1B(2))
        norm = sum(jnp.sum(lax.mul(grad, grad)) for grad in jax.tree.leaves(grads))
        grads = jax.tree.map(lambda grad: lax.mul(grad, lax.broadcast(norm, grad.shape)), grads)
        return sgd(weights, grads), loss

    file_regression.check(str(placed(step, WEIGHTS, XS)))


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
def test_lower(file_regression, donated):
    """Tasks, messages, frees and donations."""
    donate = 0 if donated else ()
    file_regression.check(str(planned(plain, WEIGHTS, XS, donate_argnums=donate).plan))

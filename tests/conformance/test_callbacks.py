"""Functions of Python that a step calls run as often as under ``jax.jit``, and in the same order."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpmd
from tests.support.models import batch, layer, mse, weights
from tests.support.parity import assert_close, mesh_of
from tests.support.programs.table import descend, loop

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


def arguments():
    return weights(2), *batch()


@pytest.mark.parametrize("kind", ["print", "callback", "io_callback", "pure_callback"])
def test_a_callback_runs_once_for_each_microbatch(mesh, kind, capfd):
    seen = []

    def note(index, value):
        seen.append(int(index))
        return value

    def report(i, h):
        value = jax.lax.stop_gradient(h[0, 0])
        if kind == "print":
            jax.debug.print("microbatch {}", i)
        elif kind == "callback":
            jax.debug.callback(lambda *args: note(*args) and None, i, value)
        elif kind == "io_callback":
            return jax.experimental.io_callback(note, value, i, value)
        else:
            return jax.pure_callback(note, value, i, value)
        return 0.0

    def step(state, xs, ys):
        def loss(params, i):
            h = mpmd.mark_stage_end(layer(params[0], xs[i]))
            extra = report(i, h)
            return jnp.mean((layer(params[1], h) - ys[i]) ** 2) + extra

        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(state, i), len(xs), mpmd.Std1F1B(2), mpmd.Add
        )
        return descend(state, grads), total

    expected = jax.jit(step)(*arguments())
    jax.effects_barrier()
    capfd.readouterr()
    seen.clear()
    compiled = mpmd.jit(step, mpmd_mesh=mesh)
    for _ in range(2):
        assert_close(compiled(*arguments()), expected)
    jax.effects_barrier()
    if kind == "print":
        seen = [int(line.split()[-1]) for line in capfd.readouterr().out.splitlines()]
    assert seen == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_outside_of_the_loop_runs_once(mesh, when):
    seen = []

    def step(state, xs, ys):
        if when == "before":
            jax.debug.callback(lambda v: seen.append(float(v)), xs[0, 0, 0])
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys), 2)
        new = descend(state, grads)
        if when == "after":
            norm = optax.tree.norm(new)
            jax.debug.callback(lambda v: seen.append(float(v)), norm)
        return new, total

    state, total = mpmd.jit(step, mpmd_mesh=mesh)(*arguments())
    jax.block_until_ready(float(total))
    jax.tree.map(lambda leaf: leaf.block_until_ready(), state)
    jax.effects_barrier()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["print", "io_callback"])
def test_ordered_callbacks(mesh, kind, capfd):
    """They keep the order of the microbatches, or are refused."""
    seen = []

    def step(state, xs, ys):
        def loss(params, i):
            h = mpmd.mark_stage_end(layer(params[0], xs[i]))
            if kind == "print":
                jax.debug.print("microbatch {}", i, ordered=True)
            else:
                jax.experimental.io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return jnp.mean((layer(params[1], h) - ys[i]) ** 2)

        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(state, i), len(xs), mpmd.Std1F1B(2), mpmd.Add
        )
        return descend(state, grads), total

    compiled = mpmd.jit(step, mpmd_mesh=mesh)
    float(compiled(*arguments())[1])
    jax.effects_barrier()
    if kind == "print":
        seen = [int(line.split()[-1]) for line in capfd.readouterr().out.splitlines()]
    assert seen == [0, 1, 2, 3]

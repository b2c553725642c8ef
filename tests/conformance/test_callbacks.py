"""Functions of Python that a step calls run as often as under ``jax.jit``, and in the same order."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, layer, weights
from tests.support.parity import assert_close
from tests.support.programs.table import by_index

pytestmark = pytest.mark.usefixtures("quick_compiles")


def arguments():
    return weights(2), *batch()


@pytest.mark.parametrize("kind", ["io_callback", "ordered", "pure_callback"])
def test_a_callback_whose_result_is_read_runs_once_for_each_microbatch(mesh, kind):
    seen = []

    def note(index, value):
        seen.append(int(index))
        return value

    def report(i, h):
        value = jax.lax.stop_gradient(h[0, 0])
        if kind == "pure_callback":
            return jax.pure_callback(note, value, i, value)
        return jax.experimental.io_callback(note, value, i, value, ordered=kind == "ordered")

    def loss(params, i, xs, ys):
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        extra = report(i, h)
        return jnp.mean((layer(params[1], h) - ys[i]) ** 2) + extra

    step = by_index(loss)
    expected = jax.jit(step)(*arguments())
    jax.effects_barrier()
    seen.clear()
    compiled = mpmd.jit(step, mpmd_mesh=mesh)
    for _ in range(2):
        assert_close(compiled(*arguments()), expected)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3] * 2

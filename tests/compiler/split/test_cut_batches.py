"""Batches whose rows are sharded, and that the step itself cuts into microbatches.

Each device has its share of every microbatch to do, and tasks gather nothing.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.plan import Cell
from tests.support.collectives import collectives_of
from tests.support.explicit import draws
from tests.support.models import WIDTH, descend, mse, weights
from tests.support.parity import assert_parity_on, mesh_of, uneven_mesh_of

MICROBATCHES, ROWS = 4, 4
X, Y = draws(MICROBATCHES * ROWS, WIDTH, seed=1), draws(MICROBATCHES * ROWS, WIDTH, seed=2)


def train(cut, stages=2):
    """A step of gradient descent over a batch that ``cut`` makes microbatches of."""

    def step(params, x, y):
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(jax.checkpoint(mse))(params, *(h.astype("float32") for h in mb)),
            (cut(x), cut(y)),
            schedule=mpmd.Std1F1B(stages),
            operation=mpmd.Mean,
        )
        return descend(params, grads), loss

    return step


def specs_of_microbatches(loaded, shape):
    """How the loop's tasks read the microbatches."""
    runs = [run for program in loaded.plan.programs for run in program.runs if isinstance(run.task, Cell)]
    tasks = [loaded.plan.executable(name) for name in {run.executable for run in runs}]
    inputs = [pair for task in tasks for pair in zip(task.inputs, task.in_specs, strict=True)]
    return {spec for aval, spec in inputs if aval.shape == shape}


CUTS = {
    "microbatches": lambda x: mpmd.microbatches(x, MICROBATCHES),
    "reshape": lambda x: x.reshape(MICROBATCHES, -1, WIDTH),
    "computed with": lambda x: jnp.tanh(mpmd.microbatches(x, MICROBATCHES) * 2).astype(jnp.bfloat16),
    "shifted": lambda x: jnp.roll(mpmd.microbatches(x, MICROBATCHES), 1, axis=2),
    "transposed": lambda x: jnp.swapaxes(x.reshape(MICROBATCHES, WIDTH, ROWS), 1, 2),
}


@pytest.mark.usual("shifted")
@pytest.mark.parametrize("cut", CUTS)
def test_rows_stay_sharded(cut):
    with mesh_of(2, data=2) as mesh:
        specs = (P(), P("data"), P("data"))
        loaded = assert_parity_on(mesh, train(CUTS[cut]), weights(2), X, Y, in_specs=specs, donate_argnums=0)
        in_loop, _ = collectives_of(loaded, mesh)
    sharded = {(None, None, "data")} if cut == "transposed" else {(None, "data")}
    assert specs_of_microbatches(loaded, (MICROBATCHES, ROWS, WIDTH)) == sharded
    if cut != "transposed":  # there it is the features that stay sharded
        assert not any(in_loop.values()), "gradients are summed up after the loop"


def test_rows_that_divide_by_some_axes_alone():
    """Two rows of a microbatch over four devices."""
    with mesh_of(2, data=2, more=2) as mesh:
        step = train(lambda x: mpmd.microbatches(x, 8))
        specs = (P(), P(("data", "more")), P(("data", "more")))
        loaded = assert_parity_on(mesh, step, weights(2), X, Y, in_specs=specs)
    assert specs_of_microbatches(loaded, (8, 2, WIDTH)) == {(None, "data")}


def test_a_loop_without_stages():
    """It is a scan outside of the pipeline."""
    with mesh_of(1, data=2) as mesh:
        step = train(CUTS["microbatches"], stages=1)
        loaded = assert_parity_on(mesh, step, weights(1), X, Y, in_specs=(P(), P("data"), P("data")))
        _, outside = collectives_of(loaded, mesh)
    assert {c.operation for found in outside.values() for c in found} == {"all-to-all", "all-reduce"}


@pytest.mark.slow
def test_groups_of_different_sizes():
    with uneven_mesh_of({"data": 4}, {"data": 2}) as mesh:
        specs = (P(), P("data"), P("data"))
        loaded = assert_parity_on(mesh, train(CUTS["microbatches"]), weights(2), X, Y, in_specs=specs)
    assert specs_of_microbatches(loaded, (MICROBATCHES, ROWS, WIDTH)) == {(None, "data")}

"""Specs with unreduced axes, by which users of JAX keep partial sums: refused with the remedy, or right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.explicit import draws, grid
from tests.support.models import planned
from tests.support.parity import assert_close

PARTIAL = P(unreduced={"fsdp"})
REMEDY = r"unreduced=\{'fsdp'\}.*leave them out: groups keep partial sums .* as partial_sums of mpmd.jit says"
WIDTH = 4
WEIGHTS = [draws(WIDTH, WIDTH, seed=1), draws(WIDTH, WIDTH, seed=2)]
ROWS = draws(8, WIDTH, seed=3)


def loss(params, x):
    hidden = mpmd.mark_stage_end(jnp.tanh(x @ params[0]))
    return jnp.mean((hidden @ params[1]) ** 2)


def step(params, x):
    return mpmd.value_and_grad(loss, num_microbatches=2, schedule=mpmd.Std1F1B(2))(params, x)


@pytest.mark.parametrize("specs", [{"in_specs": (PARTIAL, P())}, {"out_specs": (P(), PARTIAL)}], ids=str)
def test_specs_of_arguments_and_results_are_refused(specs):
    with pytest.raises(mpmd.CompileError, match=REMEDY):
        planned(step, WEIGHTS, ROWS, axes={"fsdp": 2}, **specs)


def test_shapes_of_partial_sums_are_refused():
    sharding = NamedSharding(grid(1, 2), PARTIAL)
    partial = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding) for w in WEIGHTS]
    with pytest.raises(ValueError, match=REMEDY):
        planned(step, partial, ROWS, axes={"fsdp": 2})


def test_partial_sums_behind_the_loop_are_refused_or_right():
    def resharded(params, x):
        value, gradients = step(params, x)
        return value, [reshard(reshard(g, PARTIAL), P()) for g in gradients]

    with mpmd.MpmdMesh(grid(2, 2), "stage") as mesh:
        try:
            actual = mpmd.jit(resharded, mesh, in_specs=(P(), P("fsdp")))(WEIGHTS, ROWS)
        except ValueError:
            return
        assert_close(jax.tree.map(np.asarray, actual), jax.jit(step)(WEIGHTS, ROWS))

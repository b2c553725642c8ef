"""Groups of different shapes, of one and of two processes, on Ray."""

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity_on

ADAM = optax.adam(1e-2, eps=1e-3)
ROWS = P(None, "data")
GROUPS = [{"data": 2}, {"data": 2, "model": 2}, {"data": 1}]
PROCESSES = [2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["device", "shared_memory"])
def test_training(local_ray, transport):
    """On three groups of two, four and one devices; the first one has two processes."""
    state = init(weights(6), ADAM)
    specs = jax.tree.map(lambda leaf: P("data", "model") if leaf.ndim == 2 else P(), state)
    groups = {"groups": GROUPS, "processes_per_group": PROCESSES, "cpus_per_group": 0.25}
    step = make_step(mse, mpmd.Interleaved1F1B(6, 3), ADAM)
    with cluster.launch(**groups, transport=transport) as mesh:
        assert_parity_on(mesh, step, state, *batch(3), in_specs=(specs, ROWS, ROWS), donate_argnums=0)

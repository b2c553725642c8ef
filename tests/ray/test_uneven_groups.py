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


@pytest.fixture(scope="module", params=["device", pytest.param("shared_memory", marks=pytest.mark.slow)])
def mesh(local_ray, request):
    """Three groups of two, four and one devices; the first one has two processes."""
    with cluster.launch(
        groups=GROUPS, processes_per_group=PROCESSES, cpus_per_group=0.25, transport=request.param
    ) as mesh:
        yield mesh


@pytest.mark.slow
def test_every_group_has_its_own_shape(mesh):
    assert mesh.submeshes == ({"data": 2, "model": 1}, {"data": 2, "model": 2}, {"data": 1, "model": 1})
    assert [(p.mpmd_idx, len(p.devices)) for p in mesh.processes] == [(0, 1), (0, 1), (1, 4), (2, 1)]
    assert "ClusterMesh([{'data': 2, 'model': 1}, {'data': 2, 'model': 2}" in repr(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(), P("data", "model")], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    "schedule", [mpmd.Std1F1B(3), mpmd.Interleaved1F1B(6, 3)], ids=lambda s: type(s).__name__
)
def test_training(mesh, spec, schedule):
    state = init(weights(schedule.num_stages), ADAM)
    specs = jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else P(), state)
    assert_parity_on(
        mesh,
        make_step(mse, schedule, ADAM),
        state,
        *batch(3),
        in_specs=(specs, ROWS, ROWS),
        donate_argnums=0,
    )

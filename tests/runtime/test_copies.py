"""The value of an array on each group that holds it; of groups in other processes in ``tests/ray``."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.parity import uneven_mesh_of


def on_both_groups(v, xs):
    """Returns ``v``, which both stages read and hold afterwards, and a sum."""

    def task(x):
        return jnp.sum(mpmd.mark_stage_end(x * v) * v)

    return v, mpmd.treduce(task, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)


def test_each_copy_is_on_the_devices_of_its_group():
    with uneven_mesh_of({"data": 2}, {"data": 3}) as mesh:
        step = mpmd.jit(on_both_groups, mesh, in_specs=(P("data"), P()))
        held, _ = step(jnp.arange(6.0), jnp.ones((2, 6)))
        copies = held.copies
        assert [*copies] == [*held.mpmd_idxs] == [0, 1]
        for (value, sharding), submesh in zip(copies.values(), mesh.unstack, strict=True):
            np.testing.assert_array_equal(value, np.arange(6.0))
            assert sharding == value.sharding and sharding.spec == P("data")
            assert sharding.mesh.devices.tolist() == submesh.devices.tolist()
            assert sharding.shard_shape((6,)) == (6 // submesh.size,)
        local = [array.sharding for array in held.to_mpmd_local_array]
        assert local == [copy.sharding for copy in copies.values()]

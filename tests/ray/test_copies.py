"""The value of an array on each of several groups in other processes."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.replicated_state import on_both_groups


@pytest.mark.slow
def test_each_copy_is_fetched_from_its_group(two_groups):
    step = mpmd.jit(on_both_groups, two_groups, in_specs=(P("fsdp"), P()))
    held, total = step(jnp.arange(6.0), jnp.ones((2, 6)))
    copies = held.copies
    assert [*copies] == [*held.mpmd_idxs] == [0, 1]
    for (value, sharding), submesh in zip(copies.values(), two_groups.abstract_submeshes, strict=True):
        assert isinstance(value, np.ndarray) and value.tolist() == [*range(6)]
        assert sharding.mesh == submesh and sharding.spec == P("fsdp")
        assert sharding.shard_shape((6,)) == (3,)
    assert [array.tolist() for array in held.to_mpmd_local_array] == [[*range(6)]] * 2
    assert total.to_mpmd_local_array == float(total) and len(total.copies) == 1

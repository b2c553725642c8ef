"""Parts of a mesh on Ray: steps of one beside those of another, and copies between them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.small_plans import stacked_step

LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 8, 4, 4
WEIGHTS = np.arange(LAYERS * WIDTH * WIDTH, dtype=np.float32).reshape(LAYERS, WIDTH, WIDTH) / 1000
BATCH = np.ones((MICROBATCHES, ROWS, WIDTH), np.float32)


def test_steps_and_copies_of_two_parts(two_process_groups):
    """Ten rounds: the weights go to the sampler, which is sharded otherwise, and the actor goes on."""
    mesh = two_process_groups
    assert mesh.parts == {"actor": range(1), "sampler": range(1, 2)}
    train = mpmd.jit(stacked_step(1), mesh.part("actor")).compile(WEIGHTS, BATCH)
    sample = mpmd.jit(stacked_step(1), mesh.part("sampler"), in_shardings=(P(None, None, "fsdp"), None))
    sample = sample.compile(WEIGHTS, BATCH)
    reference = jax.jit(stacked_step(1))
    weights, expected, values, losses = WEIGHTS, WEIGHTS, [], []
    for _ in range(10):
        expected, loss = reference(expected, BATCH)
        losses.append(loss)
        weights, _ = train(weights, BATCH)
        copy = mpmd.reshard(weights, to=sample)
        values.append(sample(copy, BATCH)[1])
    expected_values = [*losses[1:], reference(expected, BATCH)[1]]
    np.testing.assert_allclose(np.array([*map(float, values)]), expected_values, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(copy), np.asarray(weights))
    assert [part.mpmd_idxs for part in copy.parts] == [(1,)]
    profile = sample.profile(copy, BATCH)
    assert {event.mpmd_idx for event in profile.events} == {0}
    with pytest.raises(ValueError, match="held by groups outside of the part 'sampler'"):
        sample(weights, BATCH)

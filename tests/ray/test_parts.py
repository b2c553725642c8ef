"""Parts of a mesh on Ray: steps of one beside those of another, copies between them, and a death in one."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cluster
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


@pytest.mark.slow
def test_threads_submit_to_their_parts(two_process_groups):
    parts = [two_process_groups.part(name) for name in two_process_groups.parts]
    steps = [mpmd.jit(stacked_step(1), part).compile(WEIGHTS, BATCH) for part in parts]
    results = {}

    def run(number):
        weights = WEIGHTS
        for _ in range(20):
            weights, value = steps[number](weights, BATCH)
        results[number] = float(value)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.slow
def test_a_part_goes_on_when_a_group_of_another_dies(local_ray):
    with cluster.launch(
        parts={"actor": {"stage": 2}, "sampler": {"stage": 2}}, cpus_per_group=0.05, timeout=200
    ) as mesh:
        train = mpmd.jit(stacked_step(2), mesh.part("actor")).compile(WEIGHTS, BATCH)
        sample = mpmd.jit(stacked_step(2), mesh.part("sampler")).compile(WEIGHTS, BATCH)
        weights, _ = train(WEIGHTS, BATCH)
        copy = mpmd.reshard(weights, to=sample)
        copy.block_until_ready()
        os.kill(mesh.groups[3].pid, signal.SIGKILL)
        with pytest.raises(mpmd.GroupDiedError, match="group 3"):
            sample(copy, BATCH)[1].block_until_ready()
        for _ in range(3):
            weights, value = train(weights, BATCH)
        assert np.isfinite(float(value))
        # A program that the trainer's groups load now needs nobody else.
        norm = mpmd.jit(lambda weights: jnp.square(weights).sum(), mesh.part("actor"))(weights)
        np.testing.assert_allclose(float(norm), np.square(np.asarray(weights)).sum(), rtol=1e-5)


@pytest.mark.slow
def test_all_parts_go_back_together(local_ray):
    """With recovery: a group of either part is killed, and every value is that of a run without deaths."""
    parts = {"actor": {"stage": 2}, "sampler": {"stage": 2}}
    with cluster.launch(
        parts=parts, cpus_per_group=0.05, timeout=200, recovery=cluster.Recovery(every=3)
    ) as mesh:
        train = mpmd.jit(stacked_step(2), mesh.part("actor")).compile(WEIGHTS, BATCH)
        sample = mpmd.jit(stacked_step(2), mesh.part("sampler")).compile(WEIGHTS, BATCH)

        def run(killing):
            weights, values = WEIGHTS, []
            for number in range(10):
                weights, loss = train(weights, BATCH)
                copy = mpmd.reshard(weights, to=sample)
                values += [loss, sample(copy, BATCH)[1]]
                if number in killing:
                    jax.block_until_ready(values)
                    os.kill(mesh.groups[killing[number]].pid, signal.SIGKILL)
            return [np.asarray(value).tobytes() for value in (*values, weights)]

        expected = run({})
        assert run({3: 1, 7: 2}) == expected
        assert [report.mpmd_idxs for report in mesh.recoveries] == [(1,), (2,)]

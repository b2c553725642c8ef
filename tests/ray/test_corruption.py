"""Bits that flip while a run trains are noticed, named, and mended; a NaN is found without debug_nans.

Faults are planted in the processes of groups by way of Ray, which lets a test call any function there.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import mpmd
from cluster.recovery import Recovery
from mpmd import replay
from tests.ray.conftest import launch
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights

STEPS, PLANTED_AFTER, SECONDS = 14, 6, 60
EVERY, FLIPS = 4, 7


def train(step, disturb=lambda: None):
    """The bytes of the state after all steps. ``disturb`` is called in the middle."""
    state, (xs, ys) = init(weights(2), CLIPPED_ADAM), map(np.asarray, batch())
    for number in range(STEPS):
        if number == PLANTED_AFTER:
            jax.block_until_ready(state)
            disturb()
        state, _ = step(state, xs + number, ys)
    return [leaf.tobytes() for leaf in jax.tree.leaves(mpmd.to_host(state))]


def flip_results(actor):
    """Flips a bit of ``FLIPS`` results of the backward of microbatch 1, each time another bit."""
    left = [FLIPS]

    def wrong(call):
        def flipped(*operands):
            first, *others = call(*operands)
            if not left[0]:
                return first, *others
            left[0] -= 1
            shards = [np.array(shard.data) for shard in first.addressable_shards]
            shards[0].view(np.uint32).flat[0] ^= 1 << (20 - left[0])
            devices = [shard.device for shard in first.addressable_shards]
            placed = list(map(jax.device_put, shards, devices))
            array = jax.make_array_from_single_device_arrays(first.shape, first.sharding, placed)
            return array, *others

        return flipped

    for executor in actor._worker._programs.values():
        executor._operations = tuple(
            dataclasses.replace(each, call=wrong(each.call))
            if re.match(r"bwd.*_1$", getattr(each, "label", ""))
            else each
            for each in executor._operations
        )


@pytest.mark.slow
def test_a_device_that_is_often_wrong_is_named_and_replaced(local_ray, capsys):
    recovery = Recovery(every=EVERY, verify_every=EVERY, on_corruption="replace", max_failures=20)
    with launch({"stage": 2, "fsdp": 2}, recovery=recovery) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2), CLIPPED_ADAM), mesh, donate_argnums=0)
        undisturbed = train(step)
        assert mesh.corruptions == (), "a run without faults gives no alarm"
        pids = [group.pid for group in mesh.groups]
        wrong = mesh.runtime.actors[1]
        state = train(step, lambda: ray.get(wrong.__ray_call__.remote(flip_results), timeout=SECONDS))
        report = mesh.corruptions[0]
        assert report.kind == "computed" and report.mpmd_idxs == (1,)
        assert report.places == (f"process {pids[1]} on {report.places[0].partition(' on ')[2]}",)
        assert "group 1" in capsys.readouterr().err
        assert state == undisturbed
        assert [group.pid == pid for group, pid in zip(mesh.groups, pids, strict=True)] == [True, False]
        assert [recovered.kind for recovered in mesh.recoveries] == ["corrupted"]


@pytest.mark.slow
def test_the_first_nan_is_found_and_the_state_is_as_before(local_ray, tmp_path):
    recovery = Recovery(every=EVERY)

    def loss_of(params, x):
        hidden = mpmd.mark_stage_end(jnp.tanh(x @ params[0]))
        return jnp.sqrt((hidden @ params[1]).mean() + 1.0)

    def function(params, xs):
        loss, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(params, x), xs, mpmd.Std1F1B(2), operation=mpmd.Mean
        )
        return jax.tree.map(lambda weight, grad: weight - 0.01 * grad, params, grads), loss

    with launch(recovery=recovery) as mesh:
        step = mpmd.jit(function, mesh, donate_argnums=0)
        state = [np.full((8, 8), 0.3, np.float32)] * 2
        xs = np.ones((4, 2, 8), np.float32)
        losses = []
        for number in range(8):  # the last snapshot is that after the fifth step
            here = xs.copy()
            if number == 7:
                here[2] = -1000.0  # a negative number under the root
            state, loss = step(state, here)
            losses.append(float(loss))
        assert [bool(np.isnan(loss)) for loss in losses] == [False] * 7 + [True]
        before = [leaf.tobytes() for leaf in mpmd.to_host(state)]
        pids = [group.pid for group in mesh.groups]
        nan = mesh.find_nan(to=tmp_path / "task")
        assert replay.load(nan.path).record.task == nan.task
        assert nan.step == 8 and nan.mpmd_idx == 1 and nan.task.endswith("__2")
        assert "nan" in nan.text
        assert [leaf.tobytes() for leaf in mpmd.to_host(state)] == before
        assert [group.pid for group in mesh.groups] == pids and mesh.recoveries == ()
        state, loss = step(state, xs)
        assert mesh.find_nan(nans=False, infs=True) is None

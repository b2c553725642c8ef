"""Bits that flip while a run trains are noticed, named, and mended; a NaN is found without debug_nans.

Faults are planted in the processes of groups by way of Ray, which lets a test call any function there.
"""

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
EVERY = 4


@pytest.fixture(scope="module")
def mesh(local_ray):
    """Two groups of two devices, which repeat their steps now and then, and go on whatever is found."""
    recovery = Recovery(every=EVERY, verify_every=EVERY, on_corruption="warn", max_failures=20)
    with launch({"stage": 2, "fsdp": 2}, recovery=recovery) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    return mpmd.jit(make_step(mse, mpmd.Std1F1B(2), CLIPPED_ADAM), mesh, donate_argnums=0)


@pytest.fixture(scope="module")
def undisturbed(step):
    return train(step)


def train(step, disturb=lambda: None, steps=STEPS):
    """All losses, and the bytes of the state in the end. ``disturb`` is called in the middle."""
    state, losses = init(weights(2), CLIPPED_ADAM), []
    xs, ys = map(np.asarray, batch())
    for number in range(steps):
        if number == PLANTED_AFTER:
            float(losses[-1])
            disturb()
        state, (loss, _) = step(state, xs + number, ys)
        losses.append(loss)
    return [float(loss) for loss in losses], [leaf.tobytes() for leaf in jax.tree.leaves(mpmd.to_host(state))]


def call(mesh, mpmd_idx, function):
    return ray.get(mesh.runtime.actors[mpmd_idx].__ray_call__.remote(function), timeout=SECONDS)


def flip_weight(actor):
    """Flips a bit of a matrix that lives on the group."""
    import jax
    import numpy as np

    values = actor._worker._values
    matrices = [h for h, value in values.items() if value.ndim == 2 and value.dtype == np.float32]
    handle = max(matrices)  # others may be about to be dropped
    shards = []
    for position, shard in enumerate(values[handle].addressable_shards):
        data = np.array(shard.data)
        if position == 1:
            data.view(np.uint32).flat[0] ^= 1 << 20
        shards.append(jax.device_put(data, shard.device))
    array = values[handle]
    values[handle] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip_results(times):
    """Flips a bit of a result of the backward of microbatch 1, so many times, each time another one."""

    def plant(actor):
        import dataclasses

        import jax
        import numpy as np

        left = [times]

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
                if getattr(each, "label", "").startswith("bwd") and getattr(each, "label", "").endswith("_1")
                else each
                for each in executor._operations
            )

    return plant


def found(mesh, before):
    """The reports since there were so many."""
    return mesh.corruptions[before:]


@pytest.mark.slow
def test_a_weight(mesh, step, undisturbed, capsys):
    before = len(mesh.corruptions)
    losses, state = train(step, lambda: call(mesh, 1, flip_weight))
    (report,) = found(mesh, before)
    assert (report.kind, report.mpmd_idxs) == ("computed", (1,))
    assert report.places == (f"process {mesh.groups[1].pid} on {report.places[0].partition(' on ')[2]}",)
    assert "group 1" in capsys.readouterr().err
    assert state == undisturbed[1], "the groups have the values of the repeated run"
    assert losses[:PLANTED_AFTER] == undisturbed[0][:PLANTED_AFTER]


@pytest.mark.slow
def test_a_device_that_is_often_wrong_is_named_and_replaced(local_ray, undisturbed):
    recovery = Recovery(every=EVERY, verify_every=EVERY, on_corruption="replace", max_failures=20)
    with launch({"stage": 2, "fsdp": 2}, recovery=recovery) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2), CLIPPED_ADAM), mesh, donate_argnums=0)
        pids = [group.pid for group in mesh.groups]
        _, state = train(step, lambda: call(mesh, 1, flip_results(7)))
        report = mesh.corruptions[0]
        assert report.kind == "computed" and report.mpmd_idxs == (1,)
        assert state == undisturbed[1]
        assert [group.pid == pid for group, pid in zip(mesh.groups, pids, strict=True)] == [True, False]
        assert [recovered.kind for recovered in mesh.recoveries] == ["corrupted"]


@pytest.mark.slow
def test_a_thousand_clean_steps_give_no_alarm(mesh, step):
    """Batches are random, and so is how far the driver is ahead."""
    rng = np.random.default_rng(0)
    before, state = len(mesh.corruptions), init(weights(2), CLIPPED_ADAM)
    shapes = [np.shape(each) for each in batch()]
    for _ in range(1000):
        state, (loss, _) = step(state, *(rng.normal(size=shape).astype(np.float32) for shape in shapes))
        if rng.random() < 0.2:
            float(loss)
    assert np.isfinite(float(loss))
    assert len(mesh.corruptions) == before


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

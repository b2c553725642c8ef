"""What the benchmarks measure that has to hold."""

import jax
import numpy as np
import pytest

import mpmd
from benchmarks.init_memory import measure
from benchmarks.planned_models import LargeVocabulary, Model, UNet, UnevenMLP, balanced, equal_layers
from benchmarks.predicted_choices import made_by_hand
from benchmarks.reshard import LAYERS, Copies


@pytest.mark.slow
def test_the_driver_holds_nothing_of_a_state_that_groups_make():
    megabytes = 64
    ours, plain = measure(megabytes, "on_groups"), measure(megabytes, "in_one_process")
    assert ours.grown < megabytes / 2
    assert plain.grown >= 3 * megabytes


def test_a_copy_of_weights_sends_the_difference_of_the_layouts():
    axes, devices = ("stage", "model"), jax.devices()
    submeshes = [
        jax.sharding.Mesh([of_group], axes) for of_group in ([devices[0]], [devices[1]], [*devices[2:4]])
    ]
    width = 4
    all_bytes = LAYERS * width * width * 4
    with mpmd.MpmdMesh(submeshes, parts={"trainer": 2, "sampler": 1}) as mesh:
        copies = Copies(mesh, width)
        moved = [copies.moved(name) for name in copies.moves]
        assert all(0 < called <= whole for whole, called in map(copies.seconds, copies.moves))
    assert [copy.sent for copy in moved] == [copy.lacking for copy in moved]
    assert [copy.sent for copy in moved] == [all_bytes, all_bytes, all_bytes, 0]


@pytest.mark.usual("U-Net")
@pytest.mark.parametrize(
    "model",
    [UNet(4, 8, 4), LargeVocabulary(2, 8, 2, 4, 32, 4), UnevenMLP((4, 8, 16, 4), 4)],
    ids=lambda model: model.name,
)
def test_plans_by_hand_compute_what_the_open_step_computes(model: Model):
    plan = made_by_hand(model, 2)[-1]
    state, loss = model.open_step(model.state(), *model.batch())
    step = model.scheduled_step(plan.layers_per_stage, mpmd.ZeroBubble(2))
    submeshes = [jax.sharding.Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2]]
    with mpmd.MpmdMesh(submeshes) as mesh:
        of_hand = mpmd.jit(step, mesh)(model.state(), *model.microbatches(4))
        np.testing.assert_allclose(of_hand[1], loss, rtol=1e-5)
        for leaf, expected in zip(jax.tree.leaves(of_hand[0]), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-2, atol=1e-5)


def test_layers_are_cut_by_their_amounts():
    assert equal_layers(11, 2) == (6, 5) and equal_layers(6, 4) == (2, 2, 1, 1)
    assert balanced([1, 1, 1, 1, 4], 2) == (4, 1)
    assert balanced([3, 1, 1, 1, 2], 3) == (1, 2, 2)
    assert balanced(LargeVocabulary().work(), 2) == (5, 1)

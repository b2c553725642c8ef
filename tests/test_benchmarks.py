"""What the benchmarks measure that has to hold."""

import jax
import pytest

import mpmd
from benchmarks.init_memory import measure
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

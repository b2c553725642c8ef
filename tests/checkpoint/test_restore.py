"""A checkpoint is restored onto any groups, whoever has written it."""

import jax
import numpy as np
import pytest

import mpmd
from mpmd.runtime import storage
from tests.support.asked import note_requests
from tests.support.checkpoint_state import compiled, initial_state, save_plain, step_of, tokens
from tests.support.digests import digests
from tests.support.parity import mesh_of, uneven_mesh_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of 2 groups of 2 devices after a step, its digests, and the loss of the next step."""
    path = tmp_path_factory.mktemp("checkpoints") / "saved"
    with mesh_of(2, fsdp=2) as mesh:
        step = compiled(mesh, mpmd.Std1F1B(2), sharded=True)
        state, _ = step(initial_state(), tokens())
        mpmd.save(path, state)
        expected = digests(mpmd.to_host(state))
        return path, expected, float(step(state, tokens())[1])


@pytest.fixture(scope="module")
def on_four():
    """A step on four groups."""
    with mesh_of(4) as mesh:
        yield compiled(mesh, mpmd.Eager1F1B(4))


def check_continues(step, saved):
    path, expected, loss = saved
    state = step.restore(path)
    assert digests(mpmd.to_host(state)) == expected
    for leaf, wanted in zip(jax.tree.leaves(state), step.plan.inputs, strict=False):
        assert (leaf.mpmd_idxs, leaf._spec) == (wanted.mpmd_idxs, wanted.spec)
    np.testing.assert_allclose(float(step(state, tokens())[1]), loss, rtol=1e-5)


def test_more_groups_and_another_schedule_continue_where_the_first_ones_were(on_four, saved):
    check_continues(on_four, saved)


@pytest.mark.slow
def test_uneven_groups_continue_where_the_first_ones_were(saved):
    with uneven_mesh_of({"fsdp": 1}, {"fsdp": 4}) as mesh:
        check_continues(compiled(mesh, mpmd.Std1F1B(2), sharded=True), saved)


def test_plain_jax_restores_and_saves(on_four, saved, tmp_path):
    """As far as a step, between two steps of groups."""
    path, expected, loss = saved
    here = jax.eval_shape(initial_state) | {"count": jax.ShapeDtypeStruct((), "int32")}
    state = mpmd.restore(path, here)
    assert digests(state) == expected
    state, found = jax.jit(step_of(mpmd.Std1F1B(2)))(state, tokens())
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    save_plain(tmp_path / "plain", state)
    restored = on_four.restore(tmp_path / "plain")
    assert digests(mpmd.to_host(restored)) == digests(state)


def test_a_number_of_python_becomes_the_array_that_the_step_reads(on_four, tmp_path):
    state = initial_state()
    assert state["count"] == 0
    save_plain(tmp_path / "plain", state)
    restored = on_four.restore(tmp_path / "plain")
    assert (restored["count"].dtype, int(restored["count"])) == (np.int32, 0)


def test_a_number_of_python_of_another_kind_is_refused(on_four, tmp_path):
    save_plain(tmp_path / "plain", initial_state() | {"count": 0.5})
    with pytest.raises(ValueError, match=r"count is float64\[\] in the checkpoint, not int32\[\]"):
        on_four.restore(tmp_path / "plain")


def test_a_number_of_python_that_does_not_fit_is_refused(on_four, tmp_path):
    save_plain(tmp_path / "plain", initial_state() | {"count": 2**40})
    with pytest.raises(mpmd.CheckpointError, match="number 1099511627776 does not fit into int32"):
        on_four.restore(tmp_path / "plain")


def test_a_mesh_of_fewer_groups_than_the_step_is_refused(on_four, saved):
    with mesh_of(2) as mesh, pytest.raises(ValueError, match="on group 3 of its step, and the mesh has 2 gr"):
        mpmd.restore(saved[0], on_four.argument_leaves(), mesh)


def test_a_target_may_be_arrays_on_groups(on_four, saved):
    path, expected, _ = saved
    state, _ = on_four(initial_state(), tokens())
    on_four(state, tokens())  # which donates it: where it was is known all the same
    restored = mpmd.restore(path, state)
    assert digests(mpmd.to_host(restored)) == expected


def test_a_group_reads_what_it_needs_from_storage(on_four, saved, monkeypatch):
    path, _, _ = saved
    noted = note_requests(monkeypatch, on_four.mesh.runtime)
    state = on_four.restore(path)
    asked = {group: request.stored for requests in noted for group, request in requests.items()}
    for group, stored in asked.items():
        assert set(stored) == {leaf.handle for leaf in jax.tree.leaves(state) if group in leaf.mpmd_idxs}
    layers = {layer.handle for layer in state["params"]["layers"]}
    assert set(asked[1]) & layers == {state["params"]["layers"][1].handle}


class OpenedArray:
    """In place of TensorStore's: remembers what is read."""

    def __init__(self, value):
        self.value, self.shape, self.read_regions = value, value.shape, []

    def __getitem__(self, region):
        self.read_regions.append(region)
        part = self.value[region]

        class Part:
            def read(self):
                return self

            def result(self):
                return part

        return Part()


def test_a_process_reads_each_part_once():
    value = np.arange(16.0).reshape(4, 4)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    submesh = jax.sharding.Mesh(devices, ("fsdp", "model"))
    opened = OpenedArray(value)
    array = storage._start_reading(opened, storage.StoredArray({}, np.dtype("float32"), ("fsdp",)), submesh)()
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, value)
    assert opened.read_regions == [(slice(0, 2), slice(None)), (slice(2, 4), slice(None))]


def test_doubles_are_restored_as_doubles(tmp_path):
    """Also where JAX's setting is off by then: the step was compiled for them."""

    def scale(scale, xs):
        def stage(x):
            return mpmd.mark_stage_end(x * scale)

        return scale, mpmd.treduce(stage, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    with jax.enable_x64(True), mesh_of(2) as mesh:
        value = np.full(3, 1 / 3)
        step = mpmd.jit(scale, mesh).compile(value, np.ones((2, 3)))
        mpmd.save(tmp_path / "saved", step(value, np.ones((2, 3)))[0])
        with jax.enable_x64(False):
            restored = step.restore(tmp_path / "saved")
        np.testing.assert_array_equal(np.asarray(restored), value)
        assert restored.dtype == np.float64

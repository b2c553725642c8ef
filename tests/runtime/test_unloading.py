"""Groups keep a program as long as its step is there and the mesh is open."""

import gc
import weakref

import jax
import numpy as np
import pytest

import mpmd
from tests.support.asked import note_requests
from tests.support.models import batch, shrink, weights
from tests.support.parity import mesh_of


def loaded_programs(mesh):
    """The numbers of the programs that each group has, after all that it was asked before."""
    gc.collect()
    groups = mesh.runtime._groups
    return [group.submit(lambda group=group: sorted(group.worker._programs)).result() for group in groups]


def test_a_dropped_function_is_unloaded(mesh):
    step = mpmd.jit(shrink, mpmd_mesh=mesh)
    state, _ = step(weights(2), *batch())
    step(state, *batch(2))
    assert loaded_programs(mesh) == [[0, 1], [0, 1]]
    result, _ = step(state, *batch())
    del step
    assert loaded_programs(mesh) == [[], []]
    assert np.isfinite(np.asarray(jax.tree.leaves(result)[0])).all()


def test_a_program_that_one_group_cannot_load_stays_nowhere(mesh, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no room")

    step = mpmd.jit(shrink, mpmd_mesh=mesh)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(mesh.runtime._groups[1].worker, "load", fail)
        step(weights(2), *batch())
    assert loaded_programs(mesh) == [[], []]
    assert np.isfinite(float(step(weights(2), *batch())[1]))


def test_nothing_keeps_a_closed_mesh_alive(tmp_path):
    mesh = mesh_of(2)
    step = mpmd.jit(shrink, mpmd_mesh=mesh)
    loaded = step.compile(weights(2), *batch())
    float(step(weights(2), *batch())[1])
    runtime = weakref.ref(mesh.runtime)
    mesh.close()
    gc.collect()
    assert runtime() is None
    with pytest.raises(
        RuntimeError, match="the mesh was closed, and the step was unloaded; compile it again"
    ):
        loaded(weights(2), *batch())
    for use in (lambda: loaded.init(lambda: weights(2)), lambda: loaded.restore(tmp_path)):
        with pytest.raises(RuntimeError, match="the mesh was closed, and the step was unloaded"):
            use()
    assert "runtime" not in vars(mesh)
    with mesh:
        assert np.isfinite(float(step(weights(2), *batch())[1]))


def test_a_result_does_not_keep_what_a_closed_mesh_held():
    mesh = mesh_of(2)
    with mesh:
        state, _ = mpmd.jit(shrink, mpmd_mesh=mesh)(weights(2), *batch())
        workers = [group.worker for group in mesh.runtime._groups]
    assert not any(worker._values or worker._programs for worker in workers)
    with pytest.raises(RuntimeError, match="the mesh was closed"):
        state[0]["w"].to_mpmd_local_array  # noqa: B018


def test_a_step_does_not_keep_its_first_arguments(mesh):
    step = mpmd.jit(shrink, mpmd_mesh=mesh)
    xs, ys = batch()
    state, _ = step(weights(2), xs, ys)
    mpmd.to_host(state)  # asks all groups, so none is at the step any more
    first = weakref.ref(xs)
    del xs, ys
    gc.collect()
    assert first() is None


def test_a_loaded_step_keeps_its_mesh():
    step = mpmd.jit(shrink, mpmd_mesh=mesh_of(2)).compile(weights(2), *batch())
    gc.collect()
    _, loss = step(weights(2), *batch())
    assert np.isfinite(float(loss))


def test_a_loaded_step_keeps_nothing_that_only_loading_needed(mesh):
    """As long as a function lives, JAX keeps what it has lowered it to: more than all else of a step."""
    state = weights(2)
    lowered = mpmd.jit(shrink, mesh).lower(state, *batch())
    functions = [weakref.ref(function) for function in lowered.compiled.program.functions.values()]
    loaded = lowered.compile()
    assert np.isfinite(float(loaded(state, *batch())[1]))
    del lowered
    gc.collect()
    assert functions and not any(function() for function in functions)
    assert "treduce" in str(mpmd.explain(loaded))
    assert loaded.report().seconds


def test_groups_without_a_part_in_a_step_are_not_asked_and_drop_what_is_released(mesh, monkeypatch):
    params, _ = mpmd.jit(shrink, mesh)(weights(2), *batch())
    of_group = [[leaf for leaf in jax.tree.leaves(params) if leaf.mpmd_idxs == (i,)] for i in range(2)]
    doubled = mpmd.jit(lambda leaves: [2 * leaf for leaf in leaves], mesh)
    doubled(of_group[0])
    asked = note_requests(monkeypatch, mesh.runtime)
    (group,) = mesh.runtime._groups[1:]
    values = [group.submit(lambda: len(group.worker._values)).result()]
    dropped = len(of_group[1])
    del params
    of_group[1].clear()
    gc.collect()
    doubled(of_group[0])
    values.append(group.submit(lambda: len(group.worker._values)).result())
    assert [set(requests) for requests in asked] == [{0}]
    assert dropped and values == [values[0], values[0] - dropped]

"""Steps that do not reach all groups, and calls that come when the mesh is being closed."""

import gc
import threading

import jax
import pytest

import mpmd
from mpmd.runtime import in_process
from mpmd.runtime.protocol import ReleaseQueue
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

SECONDS = 60


@pytest.fixture
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture
def trained(mesh):
    """A step, and what its first call returned."""
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=mesh)
    state, _ = step(init(weights(2)), *batch())
    return step, jax.block_until_ready(state)


def held(mesh):
    """The number of values that each group has, after all that it was asked before."""
    groups = mesh.runtime._groups
    return [group.submit(lambda group=group: len(group.worker._values)).result(SECONDS) for group in groups]


def test_after_an_interrupt_between_two_groups_the_mesh_goes_on(mesh, trained, monkeypatch):
    step, state = trained

    def interrupt(call):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mesh.runtime._groups[1], "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(state, *batch())
    done = threading.Event()

    def run():
        jax.block_until_ready(step(state, *batch()))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(SECONDS)


def test_the_results_of_an_interrupted_step_are_freed(mesh, trained, monkeypatch):
    step, state = trained
    submit_step = mesh.runtime.submit_step

    def interrupted(requests):
        submit_step(requests)
        raise KeyboardInterrupt

    def held_after_three_steps():
        for _ in range(3):
            gc.collect()  # a traceback keeps the arrays of an interrupted call until then
            jax.block_until_ready(step(state, *batch()))
        return held(mesh)

    before = held_after_three_steps()
    with monkeypatch.context() as patched:
        patched.setattr(mesh.runtime, "submit_step", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                step(state, *batch())
    assert held_after_three_steps() == before


def test_a_call_that_comes_as_the_thread_ends_fails(mesh, trained, monkeypatch):
    _, state = trained
    future = in_process.Future

    def close_first():
        monkeypatch.setattr(in_process, "Future", future)
        mesh.close()
        return future()

    runtime, array = mesh.runtime, jax.tree.leaves(state)[0]
    monkeypatch.setattr(in_process, "Future", close_first)
    with pytest.raises(RuntimeError, match="the mesh was closed"):
        runtime.fetch(array.mpmd_idxs[0], array.handle).result(SECONDS)


def test_what_is_released_is_told_once_whoever_asks():
    queue, told = ReleaseQueue(1), []
    threads = [
        threading.Thread(target=lambda: told.extend(h for _ in range(200) for h in queue.take(0).handles))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for handle in range(5000):
        queue.add_handle((0,), handle)
    for thread in threads:
        thread.join()
    assert sorted([*told, *queue.take(0).handles]) == list(range(5000))


def test_a_step_is_compiled_anew_for_64_bits(mesh):
    def step(params, xs, ys):
        total = mpmd.treduce(
            lambda mb: mse(params, *mb), (xs, ys), mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )
        return total, jax.numpy.arange(3) * 1.0

    compiled = mpmd.jit(step, mpmd_mesh=mesh)
    assert compiled(weights(2), *batch())[1].dtype == "float32"
    with jax.enable_x64(True):
        assert compiled(weights(2), *batch())[1].dtype == "float64"

"""Ctrl-C in a submission or a wait, steps that reach some groups, and calls while the mesh is closed."""

import gc
import signal
import threading

import jax
import numpy as np
import pytest

import mpmd
from mpmd.runtime import in_process
from mpmd.runtime.interrupts import DeferredInterrupt
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.step_future import StepFuture
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights
from tests.support.parity import assert_close

SECONDS = 60
STEP = make_step(mse, mpmd.Std1F1B(2), CLIPPED_ADAM)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def after(count):
    """The state of plain JAX after so many steps."""
    state = init(weights(2), CLIPPED_ADAM)
    for _ in range(count):
        state, _ = jax.jit(STEP)(state, *batch())
    return state


@pytest.fixture
def trained(mesh):
    """A step, and what its first call returned."""
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=mesh)
    state, _ = step(init(weights(2)), *batch())
    return step, jax.block_until_ready(state)


@pytest.fixture
def donating(mesh):
    """A step that takes its state over, and the state after the first call."""
    step = mpmd.jit(STEP, mesh, donate_argnums=0)
    state, _ = step(init(weights(2), CLIPPED_ADAM), *batch())
    return step, jax.block_until_ready(state)


def interrupt_in(monkeypatch, owner, name, after=False):
    """Has the next call of a function be interrupted."""
    function = getattr(owner, name)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(owner, name, function)
        if after:
            result = function(*args, **kwargs)
            interrupt()
            return result
        interrupt()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


def held(mesh):
    """The number of values that each group has, after all that it was asked before."""
    groups = mesh.runtime._groups
    return [group.submit(lambda group=group: len(group.worker._values)).result(SECONDS) for group in groups]


@pytest.mark.parametrize(("group", "sent"), [(0, False), (1, True)])
def test_an_interrupt_while_a_step_is_submitted_leaves_the_state_after_it(
    mesh, donating, monkeypatch, group, sent
):
    step, state = donating
    interrupt_in(monkeypatch, mesh.runtime._groups[group], "submit", after=sent)
    with pytest.raises(KeyboardInterrupt) as raised:
        step(state, *batch())
    (note,) = raised.value.__notes__
    assert "The state that was donated to it by groups' arrays is now what it returns" in note
    assert_close(state, after(2))
    state, _ = step(state, *batch())
    assert_close(state, after(3))


def test_state_of_the_host_is_not_deleted_by_an_interrupted_call(mesh, monkeypatch):
    step = mpmd.jit(STEP, mesh, donate_argnums=0)
    state = jax.tree.map(jax.numpy.asarray, init(weights(2), CLIPPED_ADAM))
    step.compile(state, *batch())
    interrupt_in(monkeypatch, mesh.runtime._groups[1], "submit")
    with pytest.raises(KeyboardInterrupt):
        step(state, *batch())
    assert_close(step(state, *batch())[0], after(1))


def test_an_interrupt_of_a_wait_leaves_the_steps_that_were_called(donating, monkeypatch):
    step, state = donating
    state, (loss, _) = step(state, *batch())
    interrupt_in(monkeypatch, StepFuture, "reply")
    with pytest.raises(KeyboardInterrupt):
        jax.block_until_ready(state)
    assert np.isfinite(float(loss))
    assert_close(state, after(2))


def test_a_deferred_interrupt_comes_at_the_end_and_a_second_one_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        interrupt()
        done.append("after the first")
        interrupt()
        done.append("after the second")
    assert done == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        interrupt()
        done.append("again")
    assert done[1:] == ["again"]


def test_a_handler_of_the_users_is_called_and_all_goes_on(mesh, donating, monkeypatch):
    step, state = donating
    asked = []
    handler = signal.signal(signal.SIGINT, lambda *_: asked.append("stop"))
    try:
        interrupt_in(monkeypatch, mesh.runtime._groups[1], "submit")
        state, _ = step(state, *batch())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert asked == ["stop"]
    assert_close(state, after(2))


def test_after_an_interrupt_between_two_groups_the_mesh_goes_on(mesh, trained, monkeypatch):
    step, state = trained

    def interrupt(call):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mesh.runtime._groups[1], "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(state, *batch())
    jax.block_until_ready(step(state, *batch()))  # which would wait for ever


def test_the_results_of_an_interrupted_step_are_freed(mesh, trained, monkeypatch):
    step, state = trained
    ask = mesh.runtime.ask

    def interrupted(requests):
        ask(requests)
        raise KeyboardInterrupt

    def held_after_three_steps():
        for _ in range(3):
            gc.collect()  # a traceback keeps the arrays of an interrupted call until then
            jax.block_until_ready(step(state, *batch()))
        return held(mesh)

    before = held_after_three_steps()
    with monkeypatch.context() as patched:
        patched.setattr(mesh.runtime, "ask", interrupted)
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


def test_the_error_of_dropped_steps_is_gone():
    with pytest.raises(AttributeError, match=r"delete the except clauses that name it"):
        mpmd.StepDroppedError  # noqa: B018

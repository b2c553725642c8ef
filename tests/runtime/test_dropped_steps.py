"""Ctrl-C while steps are submitted, or waited for: the state stays usable, and what is queued is dropped."""

import gc
import signal
import threading

import jax
import numpy as np
import pytest

import mpmd
from mpmd.arrays.array import StepFuture
from mpmd.runtime.interrupts import DeferredInterrupt
from mpmd.runtime.protocol import ReleaseQueue
from mpmd.runtime.requests import Released
from mpmd.runtime.step_gate import StepGate
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights
from tests.support.parity import assert_close, mesh_of

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
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture
def trained(mesh):
    """A step that takes its state over, and the state after the first call."""
    step = mpmd.jit(STEP, mesh, donate_argnums=0)
    state, _ = step(init(weights(2), CLIPPED_ADAM), *batch())
    return step, jax.block_until_ready(state)


class Blocked:
    """Has group 0 wait within the next step that it begins, until it is let go."""

    def __init__(self, mesh, monkeypatch):
        self.begun, self._go = threading.Event(), threading.Event()
        worker = mesh.runtime._groups[0].worker
        run_step = worker.run_step

        def blocked(*arguments):
            self.begun.set()
            assert self._go.wait(SECONDS)
            return run_step(*arguments)

        monkeypatch.setattr(worker, "run_step", blocked)

    def let_go(self):
        self._go.set()


@pytest.fixture
def blocked(mesh, trained, monkeypatch):
    return Blocked(mesh, monkeypatch)


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


def queue_steps(step, state, blocked, count):
    """Calls steps, of which group 0 has begun the first. Returns the state, and what else each returned."""
    others = []
    for _ in range(count):
        state, other = step(state, *batch())
        others.append(other)
    assert blocked.begun.wait(SECONDS)
    return state, others


def held(mesh):
    """The number of values that each group has, after all that it was asked before."""
    groups = mesh.runtime._groups
    return [group.submit(lambda group=group: len(group.worker._values)).result(SECONDS) for group in groups]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupt_while_a_step_is_submitted_leaves_the_state_after_it(
    mesh, trained, monkeypatch, group, sent
):
    step, state = trained
    interrupt_in(monkeypatch, mesh.runtime._groups[group], "submit", after=sent)
    mesh.runtime.drop = lambda steps: frozenset()  # so that the step runs in any case
    with pytest.raises(KeyboardInterrupt) as raised:
        step(state, *batch())
    assert "The state that was donated to it by groups' arrays is now what it returns" in notes(raised)
    assert_close(state, after(2))
    state, _ = step(state, *batch())
    assert_close(state, after(3))


def test_a_step_that_is_interrupted_while_it_is_submitted_may_be_dropped(mesh, trained, blocked, monkeypatch):
    step, state = trained
    state, _ = queue_steps(step, state, blocked, 1)
    interrupt_in(monkeypatch, mesh.runtime._groups[1], "submit")
    with pytest.raises(KeyboardInterrupt) as raised:
        step(state, *batch())
    blocked.let_go()
    assert "1 step was dropped" in notes(raised) and "is now what it returns" not in notes(raised)
    assert_close(state, after(2))


def test_state_of_the_host_is_not_deleted_by_an_interrupted_call(mesh, monkeypatch):
    step = mpmd.jit(STEP, mesh, donate_argnums=0)
    state = jax.tree.map(jax.numpy.asarray, init(weights(2), CLIPPED_ADAM))
    step.compile(state, *batch())
    interrupt_in(monkeypatch, mesh.runtime._groups[1], "submit")
    with pytest.raises(KeyboardInterrupt):
        step(state, *batch())
    assert_close(step(state, *batch())[0], after(1))


@pytest.mark.parametrize("wait", ["loss", "block_until_ready", "place", "with"])
def test_an_interrupt_of_a_wait_drops_what_no_group_has_begun(trained, blocked, mesh, monkeypatch, wait):
    step, state = trained
    state, others = queue_steps(step, state, blocked, 4)
    with pytest.raises(KeyboardInterrupt) as raised:
        if wait == "loss":
            interrupt_in(monkeypatch, StepFuture, "reply")
            float(others[-1][0])
        elif wait == "block_until_ready":
            interrupt_in(monkeypatch, StepFuture, "reply")
            jax.block_until_ready(state)
        elif wait == "place":
            interrupt_in(monkeypatch, mesh.runtime.in_flight, "enter")
            step(state, *batch())
        else:
            mesh.close, close = blocked.let_go, mesh.close  # to see what is left before it is closed
            with mesh:
                interrupt()
            mesh.close = close
    blocked.let_go()
    assert "3 steps were dropped" in notes(raised) and "1 step was submitted before" in notes(raised)
    assert_close(state, after(2))
    assert np.isfinite(float(others[0][0]))
    for loss, _ in others[1:]:
        with pytest.raises(mpmd.StepDroppedError, match="call it again"):
            float(loss)
    for count in (3, 4):
        state, (loss, _) = step(state, *batch())
        assert np.isfinite(float(loss))
        assert_close(state, after(count))


def test_an_interrupt_reaches_a_thread_that_waits(trained, blocked, monkeypatch):
    """The signal is sent until it is handled: one that comes just before a thread blocks does not wake it."""
    step, state = trained
    state, _ = queue_steps(step, state, blocked, 2)
    reply, waiting, heard = StepFuture.reply, threading.Event(), threading.Event()

    def waited_for(future, mpmd_idx):
        waiting.set()
        return reply(future, mpmd_idx)

    def hear(number, frame):
        if not heard.is_set():
            heard.set()
            signal.default_int_handler(number, frame)

    def send():
        assert waiting.wait(SECONDS)
        while not heard.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(StepFuture, "reply", waited_for)
    sender, handler = threading.Thread(target=send), signal.signal(signal.SIGINT, hear)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt) as raised:
            jax.block_until_ready(state)
        sender.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    blocked.let_go()
    assert "1 step was dropped" in notes(raised)
    assert_close(state, after(2))


def notes(raised):
    return "\n".join(raised.value.__notes__)


def test_nothing_stays_of_dropped_steps(trained, mesh, monkeypatch):
    step, state = trained

    def held_after_three_steps(state):
        for _ in range(3):
            gc.collect()  # a traceback keeps the arrays of an interrupted call until then
            state, _ = jax.block_until_ready(step(state, *batch()))
        return held(mesh), state

    before, state = held_after_three_steps(state)
    for _ in range(3):
        with monkeypatch.context() as patched:
            blocked = Blocked(mesh, patched)
            state = queue_steps(step, state, blocked, 5)[0]
            interrupt_in(patched, StepFuture, "reply")
            with pytest.raises(KeyboardInterrupt):
                jax.block_until_ready(state)
            blocked.let_go()
            jax.block_until_ready(state)
    assert held_after_three_steps(state)[0] == before
    assert not mesh.runtime.in_flight.queued()


def test_arguments_that_came_with_a_dropped_step_are_sent_again(trained, blocked, mesh, monkeypatch):
    """Such as a batch that groups keep as long as the caller has it."""
    step, state = trained
    state, _ = queue_steps(step, state, blocked, 1)
    xs, ys = map(jax.numpy.asarray, batch())
    state, _ = step(state, xs, ys)
    interrupt_in(monkeypatch, StepFuture, "reply")
    with pytest.raises(KeyboardInterrupt):
        jax.block_until_ready(state)
    state, _ = step(state, xs, ys)
    blocked.let_go()
    assert_close(state, after(3))


def test_steps_that_alone_have_the_state_are_not_dropped(mesh, monkeypatch):
    """That of a step to which it was not donated, and that of the first one, which was sent it."""
    first = mpmd.jit(STEP, mesh, donate_argnums=0)
    keeping = mpmd.jit(STEP, mesh)
    state = init(weights(2), CLIPPED_ADAM)
    first.compile(state, *batch())
    jax.block_until_ready(keeping(state, *batch()))
    blocked = Blocked(mesh, monkeypatch)
    keeping(state, *batch())
    assert blocked.begun.wait(SECONDS)
    state, _ = first(state, *batch())

    def interrupted():
        interrupt_in(monkeypatch, StepFuture, "reply")
        with pytest.raises(KeyboardInterrupt) as raised:
            jax.block_until_ready(state)
        return notes(raised)

    assert interrupted() == "mpmd: 2 steps were submitted before the interrupt, and will end"
    state, _ = first(state, *batch())  # would be dropped, were it the last
    state, _ = keeping(state, *batch())
    assert interrupted() == "mpmd: 4 steps were submitted before the interrupt, and will end"
    state, _ = first(state, *batch())
    assert "1 step was dropped" in interrupted()
    blocked.let_go()
    assert_close(state, after(3))


def test_steps_before_a_copy_for_a_checkpoint_are_not_dropped(mesh, trained, blocked, monkeypatch):
    step, state = trained
    state, _ = queue_steps(step, state, blocked, 2)
    array = jax.tree.leaves(state)[0]
    copied = mesh.runtime.copy_out(array.mpmd_idxs[0], mesh.runtime.next_handle(), [array.handle])
    state, _ = step(state, *batch())
    interrupt_in(monkeypatch, StepFuture, "reply")
    with pytest.raises(KeyboardInterrupt) as raised:
        jax.block_until_ready(state)
    blocked.let_go()
    assert "1 step was dropped" in notes(raised)
    copied.result(SECONDS)
    assert_close(state, after(3))


def test_steps_that_return_losses_alone_are_dropped(mesh, monkeypatch):
    @mpmd.jit(mpmd_mesh=mesh)
    def evaluate(params, xs, ys):
        return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    expected = float(evaluate(weights(2), *batch()))
    blocked = Blocked(mesh, monkeypatch)
    losses = [evaluate(weights(2), *batch()) for _ in range(3)]
    assert blocked.begun.wait(SECONDS)
    interrupt_in(monkeypatch, StepFuture, "reply")
    with pytest.raises(KeyboardInterrupt):
        float(losses[0])
    blocked.let_go()
    assert float(losses[0]) == expected
    for loss in losses[1:]:
        with pytest.raises(mpmd.StepDroppedError):
            float(loss)


def test_a_step_that_is_not_of_all_groups_is_dropped_with_the_steps_before_it(mesh, trained, monkeypatch):
    """Group 1, which has no part in it, is told what was released, but keeps what may be given back."""
    step, state = trained
    of_group_0 = mpmd.jit(lambda x: x.sum(), mesh)
    of_group_0(np.ones(4)).block_until_ready()
    blocked = Blocked(mesh, monkeypatch)
    state, _ = queue_steps(step, state, blocked, 2)
    total = of_group_0(np.ones(4))
    interrupt_in(monkeypatch, StepFuture, "reply")
    with pytest.raises(KeyboardInterrupt) as raised:
        float(total)
    blocked.let_go()
    assert "2 steps were dropped" in notes(raised)
    assert_close(state, after(2))
    state, _ = step(state, *batch())
    assert_close(state, after(3))


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


def test_a_handler_of_the_users_is_called_and_all_goes_on(mesh, trained, monkeypatch):
    step, state = trained
    asked = []
    handler = signal.signal(signal.SIGINT, lambda *_: asked.append("stop"))
    try:
        interrupt_in(monkeypatch, mesh.runtime._groups[1], "submit")
        state, _ = step(state, *batch())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert asked == ["stop"]
    assert_close(state, after(2))


def test_a_gate_is_not_held_by_a_request_that_comes_too_late():
    gate = StepGate()
    assert gate.begin(3)
    gate.open(7, [5])
    assert gate.hold(7) == 3
    assert gate.begin(4) and not gate.begin(5) and gate.begin(6)


def test_a_held_gate_lets_no_step_begin():
    gate, began = StepGate(), []
    assert gate.hold(0) == -1
    thread = threading.Thread(target=lambda: began.extend([gate.begin(1), gate.begin(2)]))
    thread.start()
    assert not began
    gate.open(0, [1])
    thread.join(SECONDS)
    assert began == [False, True]


def test_what_was_released_with_a_dropped_step_is_told_later_but_for_what_is_taken_back():
    queue = ReleaseQueue(2)
    for handle in (1, 2):
        queue.add_handle((0, 1), handle)
    assert queue.take(0, step=5) == Released((1, 2))
    assert not queue.remove_handle((0, 1), 1)  # group 0 was told
    queue.put_back([5])
    assert queue.remove_handle((0, 1), 1) and not queue.remove_handle((0, 1), 1)
    assert queue.take(0) == queue.take(1) == Released((2,))

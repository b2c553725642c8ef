"""Ctrl-C drops the steps that no process of any group has begun; the state is that before them."""

import functools
import signal
import time

import jax
import numpy as np
import pytest

import mpmd
from mpmd.arrays.array import StepFuture
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights
from tests.support.parity import assert_close

SECONDS = 60
STEP = make_step(mse, mpmd.Std1F1B(2), CLIPPED_ADAM)


def after(count):
    """The state of plain JAX after so many steps."""
    state = init(weights(2), CLIPPED_ADAM)
    for _ in range(count):
        state, _ = jax.jit(STEP)(state, *batch())
    return state


def hold(mesh, mpmd_idxs, number):
    """Has groups begin no step. Returns the last step that each of their processes has begun."""
    calls = mesh.runtime._calls
    asked = [
        calls.call_ray(i, "hold_steps", number)
        for i, process in enumerate(mesh.processes)
        if process.mpmd_idx in mpmd_idxs
    ]
    return [last.result(SECONDS) for last in asked]


def interrupted(monkeypatch, wait):
    """What the notes of an interrupt within a wait say."""

    def interrupt(future, mpmd_idx):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StepFuture, "reply", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        wait()
    return "\n".join(raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_groups", "two_process_groups"])
@pytest.mark.parametrize("begun", [0, 1])
def test_steps_that_no_process_has_begun_are_dropped(name, begun, monkeypatch, request):
    """Group 1 is kept from beginning them; group 0 too, or it begins the first, and waits within it.

    Group 1 has no part in every second one, and keeps what is given back nevertheless.
    """
    mesh = request.getfixturevalue(name)
    step = mpmd.jit(STEP, mesh, donate_argnums=0)
    state, _ = step(init(weights(2), CLIPPED_ADAM), *batch())
    of_group_0 = mpmd.jit(lambda x: x.sum(), mesh)
    jax.block_until_ready((state, of_group_0(np.ones(4))))
    hold(mesh, [1] if begun else [0, 1], mesh.runtime.next_handle())
    losses = []
    for _ in range(4):
        state, (loss, _) = step(state, *batch())
        losses += [loss, of_group_0(np.ones(4))]
    first = mesh.runtime.in_flight.queued()[0].number
    deadline = time.monotonic() + SECONDS
    while begun and set(hold(mesh, [0], -1)) != {first}:  # such a hold does nothing
        assert time.monotonic() < deadline
    said = interrupted(monkeypatch, functools.partial(jax.block_until_ready, state))
    assert f"{8 - begun} steps were dropped" in said
    assert_close(state, after(1 + begun))
    for loss in losses[begun:]:
        with pytest.raises(mpmd.StepDroppedError):
            float(loss)
    for count in (2, 3):
        state, _ = step(state, *batch())
        assert_close(state, after(count + begun))


def test_an_interrupt_while_a_step_is_submitted_leaves_the_state_after_it(two_groups, monkeypatch):
    step = mpmd.jit(STEP, two_groups, donate_argnums=0)
    state, _ = step(init(weights(2), CLIPPED_ADAM), *batch())
    jax.block_until_ready(state)
    calls = two_groups.runtime._calls
    call_step = calls.call_step

    def interrupted(*arguments):
        replies = call_step(*arguments)
        for reply in replies.values():
            reply.result(SECONDS)  # so that it is not dropped
        signal.raise_signal(signal.SIGINT)
        return replies

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calls, "call_step", interrupted)
        step(state, *batch())
    assert_close(state, after(2))
    state, _ = step(state, *batch())
    assert_close(state, after(3))

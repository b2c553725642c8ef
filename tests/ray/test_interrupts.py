"""Ctrl-C while a step is submitted to actors: all groups have the step, and the state is that after it."""

import signal

import jax
import pytest

import mpmd
from tests.runtime.test_interrupts import STEP, after
from tests.support.models import CLIPPED_ADAM, batch, init, weights
from tests.support.parity import assert_close


def test_an_interrupt_while_a_step_is_submitted_leaves_the_state_after_it(two_groups, monkeypatch):
    step = mpmd.jit(STEP, two_groups, donate_argnums=0)
    state, _ = step(init(weights(2), CLIPPED_ADAM), *batch())
    jax.block_until_ready(state)
    calls = two_groups.runtime._calls
    ask_step = calls.ask_step

    def interrupted(*arguments):
        replies = ask_step(*arguments)
        signal.raise_signal(signal.SIGINT)
        return replies

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calls, "ask_step", interrupted)
        step(state, *batch())
    assert_close(state, after(2))
    state, _ = step(state, *batch())
    assert_close(state, after(3))

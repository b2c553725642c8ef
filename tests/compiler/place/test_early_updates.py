"""Updates that no later loop needs run before it, if that takes no time and frees memory."""

import jax
import numpy as np
import optax
import pytest

import mpmd
from mpmd.compiler.place.early_updates import EarlyUpdates
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, planned, weights

ADAM = optax.adam(1e-2)
STAGES = 2


def of_two_models(optimizer=ADAM, *, second_learns=True, keeps_gradients=False):
    """Trains a model in a loop of its own, and then another one, which does not depend on the first."""

    def step(state, xs, ys):
        first, second = state
        learn = make_step(mse, mpmd.Std1F1B(STAGES), optimizer, mpmd.Mean)
        first, (loss, grads) = learn(first, xs, ys)
        if second_learns:
            second, (other_loss, _) = learn(second, xs, ys)
        else:
            other_loss = mpmd.treduce(
                lambda mb: mse(second[0], *mb),
                (xs, ys),
                schedule=mpmd.ForwardOnly(STAGES, STAGES),
                operation=mpmd.Add,
            )
        return (first, second), (loss, other_loss, grads if keeps_gradients else ())

    return step


def state_of(optimizer=ADAM):
    return (init(weights(STAGES), optimizer),) * 2


def tasks_of(step, state, donated=True):
    """The groups that update the first model between the loops; and the most that each has in memory."""
    lowered = planned(step, state, *batch(), groups=STAGES, donate_argnums=0 if donated else ())
    updated = {leaf.name for leaf in lowered.plan.outputs if leaf.path.startswith("[0][0][0]")}
    between = {
        program.mpmd_idx
        for program in lowered.plan.programs
        for run in program.runs
        if str(run.task).startswith("between") and not updated.isdisjoint(run.outputs)
    }
    return between, lowered.compiled.verified.live_bytes


def test_updates_run_between_loops_and_gradients_are_given_up(monkeypatch):
    between, early = tasks_of(of_two_models(), state_of())
    assert between == {0, 1}
    monkeypatch.setattr(EarlyUpdates, "segments", lambda self: list(self._segments))
    between, late = tasks_of(of_two_models(), state_of())
    assert not between
    of_a_stage = sum(leaf.nbytes for leaf in jax.tree.leaves(weights(1)))
    np.testing.assert_array_equal(np.subtract(late, early), [of_a_stage] * STAGES)


LATE = {
    "groups would wait for a norm": (of_two_models(CLIPPED_ADAM), CLIPPED_ADAM, True),
    "gradients are returned": (of_two_models(keeps_gradients=True), ADAM, True),
    "the state is not given up": (of_two_models(), ADAM, False),
}


@pytest.mark.parametrize("name", LATE)
def test_other_updates_come_after_all_loops(name):
    step, optimizer, donated = LATE[name]
    between, _ = tasks_of(step, state_of(optimizer), donated)
    assert not between


def test_a_loop_without_a_backward_does_not_wait_for_its_first_group():
    """Its first group is done first, and can update its weights while the others go on."""
    between, _ = tasks_of(of_two_models(second_learns=False), state_of())
    assert between == {1}

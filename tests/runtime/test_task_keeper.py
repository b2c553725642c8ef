"""The operands and results of one task, kept while a group runs a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.errors import NonFiniteError
from mpmd.runtime.activity import Activity
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.operations import CheckValues, StepState
from mpmd.runtime.requests import Capture
from mpmd.runtime.task_keeper import TaskKeeper

DEVICE = jax.devices()[0]


def kept(keeper):
    outcome = keeper.kept(3, DEVICE)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("copies_donated", [False, True])
def test_what_a_task_has_taken_over_is_lost_unless_it_was_copied(copies_donated):
    keeper = TaskKeeper(Capture(None, 0), copies_donated)
    taken, read = jnp.full(2, 5.0), jnp.ones(2)
    keeper.begin("bwd_1__2", "bwd_1__2", [taken, read], (0,))
    taken.delete()
    captured, values = kept(keeper)
    assert captured.lost == (() if copies_donated else (0,))
    assert captured.num_inputs == 2 and len(values) == 2 - len(captured.lost)


def test_nothing_is_kept_of_a_task_that_never_came():
    keeper = TaskKeeper(Capture("fwd_0__0", 1), copies_donated=False)
    keeper.begin("fwd_0__1", "fwd_0__1", [jnp.zeros(2)], ())
    assert keeper.kept(0, DEVICE) is None


@pytest.mark.parametrize("value", [np.nan, 1.0], ids=["of before", "made"])
def test_an_error_says_whether_an_operand_had_a_nan_already(value):
    task, keeper = "fwd_0__0", TaskKeeper(Capture(None, 0), copies_donated=True)
    keeper.begin(task, task, [jnp.array([value]), np.array([np.nan], np.float32), jnp.arange(2)], ())
    refused = NonFinitePolicy(nans=True, infs=False)
    state = StepState(1, Activity(), refused, keeper=keeper, table=[jnp.array([np.nan])])
    with pytest.raises(NonFiniteError) as caught:
        CheckValues(task, task, 0, (0,), ("the result",)).perform(state)
    assert ("An operand of the task has nan already" in str(caught.value)) == np.isnan(value)

"""The operands of a task that a group keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.errors import NonFiniteError
from mpmd.runtime.activity import Activity
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.operations import CheckValues, StepState
from mpmd.runtime.requests import Capture
from mpmd.runtime.task_keeper import TaskKeeper

TASK = "fwd_0__0"


@pytest.mark.parametrize("value", [np.nan, 1.0], ids=["of before", "made"])
def test_an_error_says_whether_an_operand_had_a_nan_already(value):
    keeper = TaskKeeper(Capture(None, 0), copies_donated=True)
    keeper.begin(TASK, [jnp.array([value]), np.array([np.nan], np.float32), jnp.arange(2)], ())
    refused = NonFinitePolicy(nans=True, infs=False)
    state = StepState(1, [jnp.array([np.nan])], [], refused, None, None, Activity(), keeper)
    with pytest.raises(NonFiniteError) as caught:
        CheckValues(TASK, TASK, 0, (0,), ("the result",)).perform(state)
    assert ("An operand of the task has nan already" in str(caught.value)) == np.isnan(value)

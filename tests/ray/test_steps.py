"""Steps are queued ahead and recorded, and messages keep every bit."""

import jax
import numpy as np
import pytest

import mpmd
from tests.attribution.test_identities import check
from tests.ray.hand_written_programs import assert_messages_keep_every_bit
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_close

STEP = make_step(mse, mpmd.Std1F1B(2))


def test_steps_that_are_queued_ahead_match_plain_jax(two_groups):
    step, plain = mpmd.jit(STEP, two_groups, donate_argnums=0), jax.jit(STEP)
    state, expected, losses = init(weights(2)), init(weights(2)), []
    for _ in range(20):
        state, (loss, _) = step(state, *batch())
        losses.append(loss)
    for loss in losses:
        expected, (value, _) = plain(expected, *batch())
        np.testing.assert_allclose(float(loss), value, rtol=1e-5)
    assert_close(state, expected)


@pytest.mark.parametrize("mesh", ["two_groups", "four_groups"])
def test_messages_keep_every_bit(mesh, request):
    """Over the network, and in shared memory, where groups pass them on."""
    assert_messages_keep_every_bit(request.getfixturevalue(mesh))


def test_profiled_steps_tell_when_tasks_ran(two_process_groups):
    profile = mpmd.jit(STEP, two_process_groups).profile(init(weights(2)), *batch())
    ends = {(e.mpmd_idx, e.label): e.end for e in profile.events}
    starts = {(e.mpmd_idx, e.label): e.start for e in profile.events}
    assert ends[0, "fwd_0__0"] <= starts[1, "fwd_1__0"] + 1e-3  # clocks agree to better than a task
    assert ends[1, "bwd_1__1"] <= starts[0, "bwd_0__1"] + 1e-3
    (recorded,) = profile.steps
    assert len(recorded.processes) == 4
    assert recorded.error < 1000, "all processes of a machine read one clock"
    check(profile.attribution)

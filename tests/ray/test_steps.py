"""Steps are queued ahead and recorded, and messages keep every bit."""

import jax
import ml_dtypes
import numpy as np
import pytest

import mpmd
from tests.ray.hand_written_programs import ProgramDriver, echo_program
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_close

STEP = make_step(mse, mpmd.Std1F1B(2))
SECONDS = 60


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


ARRAYS = [
    np.array(3, "int32"),
    np.array(True),
    np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16),
    np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    np.zeros((0, 4), "float32"),
    np.array([2**40, 1]),
    np.array([1 / 3]),
    np.random.default_rng(0).standard_normal((512, 513), "float32"),
    np.arange(2**18).reshape(512, 512).astype(ml_dtypes.bfloat16),
]


@pytest.mark.parametrize("mesh", ["two_groups", "four_groups"])
def test_messages_keep_every_bit(mesh, request):
    """Over the network, and in shared memory, where groups pass them on; also values of 64 bits."""
    mesh = request.getfixturevalue(mesh)
    with jax.enable_x64(True):
        program, values = echo_program(ARRAYS, mesh.mpmd_dim)
        driver = ProgramDriver(mesh.runtime, program, values)
        for _ in range(3):
            futures, outputs = driver.step()
            for future in futures.values():
                future.result(SECONDS)
            for name, array in values.items():
                arrived = mesh.runtime.fetch(mesh.mpmd_dim - 1, outputs[name]).result(SECONDS)
                assert arrived.dtype == array.dtype
                np.testing.assert_array_equal(arrived, array)


def test_profiled_steps_tell_when_tasks_ran(two_groups):
    _, events = mpmd.jit(STEP, two_groups).profile(init(weights(2)), *batch())
    ends = {(e.mpmd_idx, e.label): e.end for e in events}
    starts = {(e.mpmd_idx, e.label): e.start for e in events}
    assert ends[0, "fwd_0__0"] <= starts[1, "fwd_1__0"] + 1e-3  # clocks agree to better than a task
    assert ends[1, "bwd_1__1"] <= starts[0, "bwd_0__1"] + 1e-3

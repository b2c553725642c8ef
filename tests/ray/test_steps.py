"""Steps of hand-written programs compute what plain JAX computes."""

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.ray.hand_written_programs import (
    TRAIN_FEEDBACK,
    ProgramDriver,
    echo_program,
    train_program,
    train_reference,
    train_values,
)

SECONDS = 60


def test_steps_that_are_queued_ahead_match_plain_jax(two_groups):
    values = train_values()
    driver = ProgramDriver(two_groups.runtime, train_program(), values, TRAIN_FEEDBACK)
    queued = [driver.step() for _ in range(20)]
    for futures, outputs in queued:
        loss, values = train_reference(values)
        np.testing.assert_allclose(futures[1].result(SECONDS).inline[outputs["t1"]], loss, rtol=1e-5)
    for mpmd_idx, name in enumerate(["w0", "w1"]):
        trained = two_groups.runtime.fetch(mpmd_idx, driver.handles[name]).result(SECONDS)
        np.testing.assert_allclose(trained, values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_loading_tells_how_long_it_took(two_groups):
    loaded = two_groups.runtime.load(train_program())
    assert list(loaded.seconds) == ["resolve", "export", "load"]
    assert all(seconds > 0 for seconds in loaded.seconds.values())
    assert len(loaded.replies) == 2
    compiling = loaded.seconds["resolve"] + loaded.seconds["load"]
    assert all(0 < reply.xla_seconds < compiling for reply in loaded.replies.values())


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
    driver = ProgramDriver(two_groups.runtime, train_program(), train_values(), TRAIN_FEEDBACK)
    futures, _ = driver.step(profile=True)
    times = [times for future in futures.values() for times in future.result(SECONDS).times]
    events = [event for of_process in times for event in of_process.events()]
    ends = {(e.mpmd_idx, e.label): e.end for e in events}
    starts = {(e.mpmd_idx, e.label): e.start for e in events}
    assert ends[0, "fwd_0__0"] <= starts[1, "fwd_1__0"] + 1e-3  # clocks agree to better than a task
    assert ends[1, "fwd_1__1"] <= starts[0, "bwd_0__1"] + 1e-3

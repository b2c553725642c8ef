"""Steps of hand-written programs compute what plain JAX computes."""

import jax
import ml_dtypes
import numpy as np
import pytest
import ray

from mpmd.program import export_function
from tests.ray.hand_written_programs import (
    TRAIN_FEEDBACK,
    ProgramDriver,
    echo_program,
    train_program,
    train_reference,
    train_values,
)

SECONDS = 60


def test_training_steps_match_plain_jax(two_groups):
    values = train_values()
    driver = ProgramDriver(two_groups.runtime, train_program(), values, TRAIN_FEEDBACK)
    for _ in range(3):
        futures, outputs = driver.step()
        loss, values = train_reference(values)
        reply = futures[1].result(SECONDS)
        np.testing.assert_allclose(reply.inline[outputs["t1"]], loss, rtol=1e-5)
    for mpmd_idx, name in enumerate(["w0", "w1"]):
        trained = two_groups.runtime.fetch(mpmd_idx, driver.handles[name]).result(SECONDS)
        np.testing.assert_allclose(trained, values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_open_specs_are_resolved_on_the_group(two_groups):
    """The microbatch's rows are split over a group's two devices, and its activations follow."""
    program = train_program()
    forward = program.plan.executable("fwd_0")
    exported = export_function(
        program.functions["fwd_0"], forward, two_groups.abstract_submeshes[0], two_groups.platform
    )
    specs = two_groups.runtime.actors[0].compile.remote(99, forward, exported)
    assert ray.get(specs, timeout=SECONDS) == (("fsdp",),)


@pytest.mark.slow
def test_loading_tells_how_long_it_took(two_groups):
    loaded = two_groups.runtime.load(train_program())
    assert list(loaded.seconds) == ["resolve", "export", "load"]
    assert all(seconds > 0 for seconds in loaded.seconds.values())
    assert len(loaded.xla_seconds) == 2
    compiling = loaded.seconds["resolve"] + loaded.seconds["load"]
    assert all(0 < seconds < compiling for seconds in loaded.xla_seconds.values())


def test_steps_can_be_queued_ahead(two_groups):
    values = train_values()
    driver = ProgramDriver(two_groups.runtime, train_program(), values, TRAIN_FEEDBACK)
    queued = [driver.step() for _ in range(20)]
    losses = [futures[1].result(SECONDS).inline[outputs["t1"]] for futures, outputs in queued]
    for loss in losses:
        expected, values = train_reference(values)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


ARRAYS = {
    "scalars": [np.array(3, "int32"), np.array(True), np.array(1.5, "float32")],
    "bfloat16": [np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16), np.array(2, ml_dtypes.bfloat16)],
    "float8": [np.arange(5).astype(ml_dtypes.float8_e4m3fn)],
    "empty": [np.zeros((0, 4), "float32"), np.zeros(0, ml_dtypes.bfloat16), np.ones(2, "float32")],
    "large": [np.random.default_rng(0).standard_normal((512, 513), "float32"), np.arange(3, dtype="uint8")],
    "large bfloat16": [np.arange(2**18).reshape(512, 512).astype(ml_dtypes.bfloat16)],
}


@pytest.mark.usual("two_groups-large bfloat16")
@pytest.mark.parametrize("arrays", ARRAYS.values(), ids=ARRAYS.keys())
@pytest.mark.parametrize("mesh", ["two_groups", "four_groups"])
def test_messages_keep_every_bit(mesh, arrays, request):
    mesh = request.getfixturevalue(mesh)
    program, values = echo_program(arrays, mesh.mpmd_dim)
    driver = ProgramDriver(mesh.runtime, program, values)
    for _ in range(3):
        futures, outputs = driver.step()
        for future in futures.values():
            future.result(SECONDS)
        for name, array in values.items():
            arrived = mesh.runtime.fetch(mesh.mpmd_dim - 1, outputs[name]).result(SECONDS)
            assert arrived.dtype == array.dtype
            np.testing.assert_array_equal(arrived, array)


def test_64_bit_values_keep_their_dtype(two_groups):
    with jax.enable_x64(True):
        program, values = echo_program([np.array([2**40, 1]), np.array([1 / 3])])
        driver = ProgramDriver(two_groups.runtime, program, values)
        futures, outputs = driver.step()
        futures[1].result(SECONDS)
        for name, array in values.items():
            arrived = two_groups.runtime.fetch(1, outputs[name]).result(SECONDS)
            assert arrived.dtype == array.dtype
            np.testing.assert_array_equal(arrived, array)


def test_received_arrays_do_not_alias_the_object_store(two_groups):
    """Many large values of many steps. If they were views of memory that is reused, they would change."""
    array = np.zeros((1024, 1024), "float32")
    kept = []
    program, _ = echo_program([array])
    for fill in range(8):
        driver = ProgramDriver(two_groups.runtime, program, {"v0": array + fill})
        futures, outputs = driver.step()
        futures[1].result(SECONDS)
        kept.append(outputs["v0"])
    fetched = [two_groups.runtime.fetch(1, handle).result(SECONDS) for handle in kept]
    for fill, value in enumerate(fetched):
        assert value.min() == value.max() == fill


@pytest.mark.slow
def test_freed_values_are_gone_after_the_next_step(two_groups):
    runtime = two_groups.runtime
    program, values = echo_program([np.ones(4, "float32")])
    driver = ProgramDriver(runtime, program, values)
    _, outputs = driver.step()
    runtime.free((1,), outputs["v0"])
    futures, _ = driver.step()
    futures[1].result(SECONDS)
    with pytest.raises(RuntimeError, match="does not have this value"):
        runtime.fetch(1, outputs["v0"]).result(SECONDS)


def test_profiled_steps_tell_when_tasks_ran(two_groups):
    driver = ProgramDriver(two_groups.runtime, train_program(), train_values(), TRAIN_FEEDBACK)
    futures, _ = driver.step(profile=True)
    times = [times for future in futures.values() for times in future.result(SECONDS).times]
    events = [event for of_process in times for event in of_process.events()]
    ends = {(e.mpmd_idx, e.label): e.end for e in events}
    starts = {(e.mpmd_idx, e.label): e.start for e in events}
    assert ends[0, "fwd_0__0"] <= starts[1, "fwd_1__0"] + 1e-3  # clocks agree to better than a task
    assert ends[1, "fwd_1__1"] <= starts[0, "bwd_0__1"] + 1e-3

"""Tasks captured in one process: the one that a caller names, and the one with which a step fails."""

import gc
import re
import stat
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import cluster
import mpmd
from mpmd.errors import NonFiniteError, TaskError
from mpmd.replay import CapturedTask, load
from mpmd.replay.report import replay, text
from mpmd.replay.values import last_digits
from mpmd.runtime.captures import Captures
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Capture
from tests.support.captured_tasks import TASKS, arguments, small_step
from tests.support.parity import mesh_of


def test_a_captured_step_computes_as_others(small):
    _, losses, plain = small
    assert losses == plain


@pytest.mark.parametrize("task", TASKS)
def test_the_executable_has_the_recorded_bits(small, task):
    captured = load(small[0] / task)
    results = captured.run()
    assert list(results) == [value.name for value in captured.record.results]
    assert captured.results and captured.differences(results) == []
    name = next(iter(results))
    changed = {**results, name: results[name] + np.ones((), results[name].dtype)}
    assert [difference.name for difference in captured.differences(changed)] == [name]


def test_a_lost_operand_is_named(small):
    captured = load(small[0] / "bwd_1__0")
    name = next(iter(captured.inputs))
    lost = CapturedTask(captured.directory, captured.record, {**captured.inputs, name: None}, {})
    with pytest.raises(ValueError, match=f"{re.escape(name)}: lost, because the task had taken them over"):
        lost.run()


def test_the_directory_is_private_and_numpy_reads_its_values(small):
    captured = load(small[0] / "bwd_1__0")
    files = list(captured.directory.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(captured.directory.stat().st_mode) == 0o700
    for file, values in (("inputs.npz", captured.inputs), ("results.npz", captured.results)):
        with np.load(captured.directory / file) as arrays:
            assert list(arrays) == list(values)
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, values[name])


def test_names_that_are_gone_say_where_the_equations_are(small):
    with pytest.raises(AttributeError, match=r"no evaluate: .* record.evaluation has what it has found"):
        _ = load(small[0] / "bwd_1__0").evaluate


def test_typed_keys_are_recorded_as_such(small):
    record = load(small[0] / "fwd_0__1").record
    (key,) = [value for value in record.inputs if value.key_impl]
    assert (key.key_impl, key.dtype) == ("threefry2x32", "uint32")


@pytest.mark.usual("int4")
@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "complex64", "bool"])
def test_values_of_each_kind_of_dtype(tmp_path, dtype):
    def step(w, file):  # which is the name of an argument of numpy.savez
        def forward(x):
            h = mpmd.mark_stage_end((x @ w[0]).astype(dtype))
            return jnp.sum(jnp.real(h).astype(jnp.float32) @ w[1])

        return mpmd.treduce(forward, file, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    w, file = np.stack([np.eye(4, dtype=np.float32)] * 2), np.ones((2, 4, 4)).astype(jnp.bfloat16)
    with mesh_of(2) as mesh:
        mpmd.jit(step, mesh).capture(w, file, task="fwd_0__1", to=tmp_path / "task")
    captured = load(tmp_path / "task")
    assert dtype in {str(array.dtype) for array in captured.results.values()}
    assert "bfloat16" in {str(array.dtype) for array in captured.inputs.values()}
    assert captured.differences(captured.run()) == []


def test_last_digits_of_doubles_count_each_number_between():
    assert last_digits(np.ones(1), np.nextafter(np.ones(1), 2)) == 1


@pytest.fixture(scope="module")
def compiled():
    """The small step on groups that capture nothing by themselves. Tests leave it usable."""
    with mesh_of(2) as mesh:
        yield mpmd.jit(small_step, mesh, donate_argnums=0).compile(*arguments())


@pytest.fixture
def mesh(tmp_path):
    with mpmd.MpmdMesh(
        jax.sharding.Mesh(jax.devices()[:2], "stage"), "stage", capture=tmp_path / "failed"
    ) as m:
        yield m


def failed(tmp_path):
    return sorted((tmp_path / "failed").iterdir()) if (tmp_path / "failed").exists() else []


def calling_python(w, x):
    def host(h):
        raise ValueError("no such row")

    def loss_fn(w, x):
        h = mpmd.mark_stage_end(x @ w[0])
        h = jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
        return jnp.sum(h @ w[1])

    return mpmd.treduce(
        lambda x: loss_fn(w, x), mpmd.microbatches(x, 2), mpmd.ForwardOnly(2, 2), operation=mpmd.Add
    )


def test_a_task_that_fails(mesh, tmp_path):
    w, x = jnp.stack([jnp.eye(4)] * 2), jnp.ones((4, 4))
    with pytest.raises(TaskError) as raised:
        float(mpmd.jit(calling_python, mesh)(w, x))
    (directory,) = failed(tmp_path)
    assert str(directory) in raised.value.__notes__[0]
    captured = load(directory)
    assert captured.record.task == "fwd_1__0" and "no such row" in captured.record.error
    with pytest.raises(
        ValueError, match=r"cannot be exported: it calls Python: pure_callback at .*test_capture"
    ):
        captured.run()
    ((source, reason),) = captured.record.evaluation.skipped
    assert (source.primitive, reason) == ("pure_callback", "it calls Python")
    assert "test_capture.py" in source.line


def with_nan():
    state, *rest = arguments()
    state[0][1][0, 0] = np.nan
    return state, *rest


def test_no_more_than_some_tasks_are_written(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(Captures, "MOST", 2)
    step = mpmd.jit(small_step, mesh)
    errors = []
    for _ in range(3):
        with jax.debug_nans(True), pytest.raises(NonFiniteError) as raised:
            float(step(*with_nan())[1])
        errors.append(raised.value)
    assert len(failed(tmp_path)) == 2
    assert [hasattr(error, "__notes__") for error in errors] == [True, True, False]
    assert not any(group.worker._captured for group in mesh.runtime._groups) or _released(mesh, step)


def _released(mesh, step):
    """The groups have dropped what they kept, once they are told."""
    jax.block_until_ready(step(*arguments()))
    return not any(group.worker._captured for group in mesh.runtime._groups)


@pytest.mark.slow
def test_operands_that_were_taken_over_are_there_under_debug_nans(mesh, tmp_path):
    step = mpmd.jit(small_step, mesh, donate_argnums=0)
    with jax.debug_nans(True), pytest.raises(NonFiniteError):
        float(step(*with_nan())[1])
    captured = load(failed(tmp_path)[0])
    assert all(array is not None for array in captured.inputs.values())
    assert captured.differences(captured.run()) == []
    result = replay(captured)
    assert captured.record.evaluation.first is None and result.nonfinite_inputs and not result.has_fault


def test_a_task_that_cannot_be_written_is_a_note(mesh, tmp_path):
    step = mpmd.jit(small_step, mesh).compile(*arguments())
    (tmp_path / "failed").write_text("a file")
    with jax.debug_nans(True), pytest.raises(NonFiniteError) as raised:
        float(step(*with_nan())[1])
    assert "could not be captured: FileExistsError" in raised.value.__notes__[0]


def test_the_error_is_raised_where_no_thread_can_start(mesh, tmp_path, monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    step = mpmd.jit(small_step, mesh).compile(*arguments())
    with jax.debug_nans(True), monkeypatch.context() as patch:
        patch.setattr("mpmd.step.capturing.threading.Thread.start", no_thread)
        with pytest.raises(NonFiniteError) as raised:
            float(step(*with_nan())[1])
    assert "could not be captured: RuntimeError: can't start new thread" in raised.value.__notes__[0]
    assert failed(tmp_path) == [] and _released(mesh, step)


def test_the_exit_of_the_program_waits_for_the_task_to_be_written(mesh, tmp_path, monkeypatch):
    """Python aborts at its end where a daemon thread is inside JAX."""
    threads, fetch_kept = [], Runtime.fetch_kept

    def noted(*args):
        threads.append(threading.current_thread())
        return fetch_kept(*args)

    monkeypatch.setattr(Runtime, "fetch_kept", noted)
    with jax.debug_nans(True), pytest.raises(NonFiniteError):
        float(mpmd.jit(small_step, mesh)(*with_nan())[1])
    assert [thread.daemon for thread in threads] == [False] and len(failed(tmp_path)) == 1


@pytest.mark.parametrize("error", [OSError, TypeError])
def test_the_state_is_returned_if_a_task_cannot_be_written(compiled, tmp_path, monkeypatch, error):
    def full(path):
        raise error("no space left")

    monkeypatch.setattr("mpmd.capture.write._opened", full)
    with pytest.warns(RuntimeWarning, match=f"fwd_0__1 could not be .* {error.__name__}: no space left"):
        _, loss = compiled.capture(*arguments(), task="fwd_0__1", to=tmp_path / "task")
    assert np.isfinite(float(loss))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_state_to_donated_arrays(compiled, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpmd.step.loaded_step.write_named", interrupted)
    state, *rest = arguments()
    before, _ = compiled(state, *rest)
    with pytest.raises(KeyboardInterrupt):
        compiled.capture(before, *rest, task="fwd_0__1", to=tmp_path / "task")
    after, _ = compiled(compiled(arguments()[0], *rest)[0], *rest)
    for mine, expected in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"task": "fwd_9__0"}, ValueError, "the step has no task 'fwd_9__0'; tasks are fwd_"),
        ({"task": 3}, TypeError, "task must be a str"),
        ({"task": "fwd_0__0", "mpmd_idx": 1}, ValueError, "group 1 does not run fwd_0__0"),
        ({"task": "fwd_0__0", "mpmd_idx": -1}, ValueError, "mpmd_idx must be a whole number"),
        ({"task": "fwd_0__0", "to": "."}, ValueError, "to: . exists"),
        ({"task": "fwd_0__0", "to": 3}, TypeError, "to must be a path"),
        ({"task": "fwd_0__0", "to": f"{__file__}/task"}, ValueError, "test_capture.py is no directory"),
    ],
)
def test_wrong_arguments(compiled, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        compiled.capture(*arguments(), **{"to": tmp_path / "task", **options})
    assert not (tmp_path / "task").exists()


def sliced(w, xs):
    """The gradient of a loss over two slices of each row, each of which reads the state before it."""

    def loss_fn(w, x):
        state, total = 0.0, 0.0
        for part in mpmd.slices(x, (0, 2, 4)):
            state = jnp.sqrt(part @ w[0] + state)
            h = mpmd.mark_stage_end(state)
            total += jnp.sum(h @ w[1])
        return total

    return mpmd.treduce(
        lambda x: jax.grad(loss_fn)(w, x), mpmd.microbatches(xs, 2), mpmd.Seq1F1B(2, 2), operation=mpmd.Add
    )


def test_a_task_of_a_slice_is_named_with_it(mesh, tmp_path):
    w, x = jnp.stack([jnp.eye(2)] * 2), np.ones((2, 4), np.float32)
    step = mpmd.jit(sliced, mesh).compile(w, x)
    step.capture(w, x, task="bwd_3__1", to=tmp_path / "task")
    captured = load(tmp_path / "task")
    assert (captured.record.task, captured.record.text) == ("bwd_3__1", "bwd_3__1 (stage 1, slice 1)")
    assert repr(captured).startswith("bwd_3__1 (stage 1, slice 1) of group 1 with")
    lines = text(replay(captured)).splitlines()
    assert lines[0].startswith("bwd_3__1 (stage 1, slice 1) of group 1, captured ")
    assert lines[1].endswith("all have the recorded bits")


def test_errors_name_the_slice_of_a_task(mesh, tmp_path):
    w, x = jnp.stack([jnp.eye(2)] * 2), np.ones((2, 4), np.float32)
    x[1, 2] = -9  # the second slice of microbatch 1
    step = mpmd.jit(sliced, mesh).compile(w, x)
    name = "fwd_2__1 (stage 0, slice 1)"
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match=re.escape(name)) as raised:
        jax.block_until_ready(step(w, x))
    assert raised.value.__notes__[0].startswith(f"mpmd: {name} of group 0 is in ")
    for wrong, message in (
        ({"task": "fwd_2__1", "mpmd_idx": 1}, f"group 1 does not run {name}, which groups [0] run"),
        ({"task": "fwd_4__1"}, f"the step has no task 'fwd_4__1'; tasks are {name}, "),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            step.capture(w, x, to=tmp_path / "other", **wrong)


@pytest.mark.parametrize("launch", [cluster.launch, mpmd.MpmdMesh])
def test_a_mesh_is_not_made_where_tasks_cannot_be_written(tmp_path, launch, monkeypatch):
    devices = jax.sharding.Mesh(jax.devices()[:2], "stage")
    first = devices if launch is mpmd.MpmdMesh else {"stage": 2}
    was_started = ray.is_initialized()  # by tests before this one
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for path in (tmp_path / "file", tmp_path / "file" / "new", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"capture: .* is no directory"):
            launch(first, "stage", capture=path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"capture: {re.escape(str(tmp_path))} is not writable"):
        launch(first, "stage", capture=tmp_path / "new" / "tasks")
    assert ray.is_initialized() == was_started, "Ray is started after the directory is checked"


@pytest.mark.slow
def test_a_task_of_a_part_has_the_numbers_of_the_mesh(tmp_path):
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(jax.devices()[:3], "stage"), "stage", parts={"a": 1, "b": 2})
    with mesh:
        step = mpmd.jit(small_step, mesh.part("b"))
        step.capture(*arguments(), task="bwd_1__1", to=tmp_path / "task")
    captured = load(tmp_path / "task")
    assert captured.record.group == 2 and captured.differences(captured.run()) == []


def test_a_task_is_captured_under_the_settings_of_its_step(mesh, tmp_path):
    def step(x):
        return mpmd.treduce(
            lambda x: jnp.sum(jnp.sqrt(mpmd.mark_stage_end(x * 2))),
            x,
            mpmd.ForwardOnly(2, 2),
            operation=mpmd.Add,
        )

    with jax.enable_x64(True), jax.debug_nans(True):
        result = mpmd.jit(step, mesh)(np.array([[1.0, -4.0], [1.0, 9.0]]))
    with pytest.raises(NonFiniteError):
        float(result)
    captured = load(failed(tmp_path)[0])
    assert {array.dtype for array in captured.inputs.values()} == {np.dtype(np.float64)}
    assert captured.differences(captured.run()) == []
    first = captured.record.evaluation.first
    assert first.source.primitive == "sqrt" and first.operands[0].dtype == "float64"


@pytest.mark.slow
def test_whoever_repeats_a_request_can_write_its_task(mesh, tmp_path):
    """Groups that go back repeat requests whose step only the number of its program names."""
    step = mpmd.jit(small_step, mesh).compile(*arguments())
    capture = Capture("fwd_0__1", mesh.runtime.next_handle())
    call = step.signature.bind(arguments(), {})
    _, future = step.submit(call, captures={0: capture})
    captured, error = future.captured(0)
    kept = mesh.runtime.fetch_kept(captured, error)
    program = step._loaded.number
    mesh.runtime.captures.write(program, kept, tmp_path / "task")
    assert load(tmp_path / "task").record.task == "fwd_0__1"
    del step, future, call
    gc.collect()
    with pytest.raises(RuntimeError, match="was dropped"):
        mesh.runtime.captures.write(program, kept, tmp_path / "other")

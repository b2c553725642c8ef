"""``step.profile(trace_dir=...)`` brings home what ``jax.profiler`` records, with the names of tasks."""

import collections
import gzip
import json
import os

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.runtime import survey
from mpmd.step import traced
from tests.support.collectives import collectives_of
from tests.support.parity import mesh_of

ROWS = np.ones((8, 16), np.float32)
WEIGHTS = np.full((2, 16, 16), 0.1, np.float32)


def train_step(weights, rows):
    def loss(weights, rows):
        hidden = mpmd.mark_stage_end(jax.numpy.tanh(rows @ weights[0]))
        return ((hidden @ weights[1]) ** 2).mean()

    return mpmd.value_and_grad(loss, num_microbatches=2, schedule=mpmd.Std1F1B(2))(weights, rows)


@pytest.fixture
def mesh():
    with mesh_of(2, data=2) as mesh:
        yield mesh


@pytest.fixture
def step(mesh):
    return mpmd.jit(train_step, mesh, in_shardings=(P(), P("data"))).compile(WEIGHTS, ROWS)


def names_in(folder):
    """How often each name occurs in the traces that Perfetto opens."""
    names = collections.Counter()
    for path in folder.glob("plugins/profile/*/*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names.update(event["name"] for event in events if event.get("ph") == "X")
    return names


def test_a_trace_has_the_tasks_and_the_collectives(mesh, step, tmp_path):
    (loss, _), events = step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)

    assert float(loss) == pytest.approx(float(jax.jit(train_step)(WEIGHTS, ROWS)[0]))
    names = names_in(tmp_path)
    for event in events:
        assert names[event.label] == sum(other.label == event.label for other in events), event.label
    (run,) = tmp_path.glob("plugins/profile/*")
    assert sorted(path.name for path in run.iterdir()) == ["all_groups.trace.json.gz", "all_groups.xplane.pb"]
    seconds = mpmd.collective_seconds(tmp_path)
    compiled = [found for each in collectives_of(step, mesh) for found in each.values()]
    assert (
        set(seconds) == {collective.operation for found in compiled for collective in found} >= {"all-reduce"}
    )
    assert 0 < sum(seconds.values()) < max(event.end for event in events) - min(e.start for e in events)


def test_the_last_run_is_read_and_one_without_collectives_has_none(step, tmp_path):
    step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)
    with mesh_of(2) as mesh:
        mpmd.jit(train_step, mesh).compile(WEIGHTS, ROWS).profile(WEIGHTS, ROWS, trace_dir=str(tmp_path))
    assert len(list(tmp_path.glob("plugins/profile/*"))) == 2
    assert mpmd.collective_seconds(tmp_path) == {}


def test_a_bad_directory_is_refused_before_anything_runs(step, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(step, "submit", lambda *args, **kwargs: pytest.fail("the step ran"))
    with pytest.raises(ValueError, match=r"trace_dir '.*/file' cannot be written: .*Not a directory"):
        step.profile(WEIGHTS, ROWS, trace_dir=tmp_path / "file")
    for wrong in (3, b"traces", True):
        with pytest.raises(TypeError, match="trace_dir must be a path"):
            step.profile(WEIGHTS, ROWS, trace_dir=wrong)
    with pytest.raises(FileNotFoundError, match="there is no trace in"):
        mpmd.collective_seconds(tmp_path)


def test_wrong_arguments_leave_no_trace(step, tmp_path):
    with pytest.raises(ValueError, match=r"rows|float32"):
        step.profile(WEIGHTS, ROWS[:4], trace_dir=tmp_path)
    assert not os.listdir(tmp_path)


def test_a_process_that_is_traced_already_is_not_traced_again(step, tmp_path):
    refused = pytest.raises(RuntimeError, match="Only one profile may be run at a time")
    with jax.profiler.trace(tmp_path / "own"), refused:
        step.profile(WEIGHTS, ROWS, trace_dir=tmp_path / "refused")
    step.profile(WEIGHTS, ROWS, trace_dir=tmp_path / "afterwards")


def test_a_step_that_fails_leaves_its_trace(step, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    for group in step._runtime()._groups:
        monkeypatch.setattr(group.worker, "_take_inputs", fail)
    with pytest.raises(RuntimeError, match="planted"):
        step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    monkeypatch.undo()
    step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)


def test_traces_that_are_lost_do_not_cost_the_result(mesh, tmp_path, monkeypatch):
    step = mpmd.jit(lambda state, rows: (state + 1, train_step(state, rows)), mesh, donate_argnums=0)
    state, _ = step(WEIGHTS, ROWS)

    def stop_traces(runtime):
        raise RuntimeError("this process was replaced")

    with monkeypatch.context() as patched:
        patched.setattr(traced, "stop_traces", stop_traces)
        with pytest.warns(RuntimeWarning, match="traces of this step are lost: this process was replaced"):
            (state, _), events = step.profile(state, ROWS, trace_dir=tmp_path)
    np.testing.assert_array_equal(state, WEIGHTS + 2)
    assert events
    survey.stop_traces(mesh.runtime)
    monkeypatch.setattr(traced, "make_run_folder", lambda trace_dir: tmp_path / "gone")
    with pytest.warns(RuntimeWarning, match="traces of this step are lost: .*No such file"):
        step.profile(state, ROWS, trace_dir=tmp_path)

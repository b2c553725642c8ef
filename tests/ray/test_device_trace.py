"""``step.profile(trace_dir=...)`` on Ray: a trace of every process comes home to the driver's machine."""

import jax
import pytest
import ray
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.runtime.requests import StartTrace, StopTrace
from tests.runtime.test_device_trace import ROWS, WEIGHTS, train_step


@pytest.mark.slow
def test_each_process_has_its_trace(two_process_groups, tmp_path):
    step = mpmd.jit(train_step, two_process_groups, in_shardings=(P(), P("fsdp"))).compile(WEIGHTS, ROWS)
    _, events = step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)
    for group in range(2):
        labels = {event.label for event in events if event.mpmd_idx == group}
        for rank in range(2):
            (path,) = tmp_path.glob(f"plugins/profile/*/group_{group}_process_{rank}.xplane.pb")
            trace = jax.profiler.ProfileData.from_file(str(path))
            names = {event.name for plane in trace.planes for line in plane.lines for event in line.events}
            assert labels <= names
    assert mpmd.collective_seconds(tmp_path)["all-reduce"] > 0


@pytest.mark.slow
def test_a_trace_of_somebody_else_is_refused_and_goes_on(two_groups, tmp_path):
    step = mpmd.jit(train_step, two_groups).compile(WEIGHTS, ROWS)
    with pytest.raises(ValueError, match="cannot be written"):
        step.profile(WEIGHTS, ROWS, trace_dir=__file__)
    traced = two_groups.runtime.actors[1]
    ray.get(traced.answer.remote(StartTrace()), timeout=60)
    with pytest.raises(RuntimeError, match="Only one profile may be run at a time"):
        step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)
    ray.get(traced.answer.remote(StopTrace()), timeout=60)
    step.profile(WEIGHTS, ROWS, trace_dir=tmp_path)
    assert len(list(tmp_path.glob("plugins/profile/*/group_*.xplane.pb"))) == 2

"""Times of tasks from an accelerator's trace: traces written by hand, and a real one of a CPU."""

import jax
import pytest

import mpmd
from mpmd.ir.process_times import Host, ProcessTimes, RecordedStep, TaskTime
from mpmd.ir.tasks import parse_task
from mpmd.runtime.device_times import TaskSpan, device_times, task_spans, with_device_times
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

AHEAD = 5_000
"""The nanoseconds by which the trace's clock is ahead of that of the process."""

TASKS = (("fwd_0__0", 10_000, 20_000), ("fwd_0__1", 22_000, 30_000), ("bwd_0__0", 31_000, 45_000))
"""The tasks of a process with the times that it has recorded."""


def text_proto(planes):
    """A trace: for each plane its lines, of events with a name, a start, an end and a group."""
    blocks = []
    for plane, lines in planes.items():
        names = sorted({event[0] for events in lines.values() for event in events})
        numbers = {name: number for number, name in enumerate(names, 1)}
        metadata = "".join(
            f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
            for name, number in numbers.items()
        )
        metadata += 'stat_metadata { key: 1 value { id: 1 name: "group" } }\n'
        body = ""
        for number, (line, events) in enumerate(lines.items()):
            body += f'lines {{ id: {number} name: "{line}" timestamp_ns: 0\n'
            for name, start, end, group in events:
                stat = "" if group is None else f"stats {{ metadata_id: 1 int64_value: {group} }}"
                body += (
                    f"events {{ metadata_id: {numbers[name]} offset_ps: {start * 1000} "
                    f"duration_ps: {(end - start) * 1000} {stat} }}\n"
                )
            body += "}\n"
        blocks.append(f'planes {{ name: "{plane}"\n{metadata}{body}}}\n')
    return "".join(blocks)


def annotations(delay=100, group=0):
    """The annotations of the tasks, each of which begins a little after its start was noted."""
    return [
        (name, start + AHEAD + delay * n, end + AHEAD, group) for n, (name, start, end) in enumerate(TASKS)
    ]


GPU = {
    "/host:CPU": {"python": [*annotations(), ("wait for group 1", 26_500, 26_900, 0), ("call", 1, 2, None)]},
    "/device:GPU:0": {
        "Stream #13(Compute)": [
            ("gemm", 16_000, 18_000, None),
            ("loop_fusion", 18_500, 24_000, None),
            ("gemm", 29_000, 34_000, None),
            ("memset", 60_000, 61_000, None),
        ],
        "Stream #14(MemcpyD2D)": [("copy", 15_500, 15_700, None)],
        "Framework Ops": [("step", 0, 100_000, None)],
    },
}

TPU = {
    "/host:CPU": {"python": annotations()},
    "/device:TPU:0": {
        "Steps": [("0", 15_200, 50_000, None)],
        "XLA Modules": [("jit_fwd_0(1)", 16_000, 24_000, None), ("jit_fwd_0(1)", 28_000, 33_000, None)],
        "XLA Ops": [("fusion", 15_300, 24_900, None)],
    },
    "/device:TPU:1": {"XLA Modules": [("jit_fwd_0(1)", 15_800, 23_000, None)]},
}


def process(on_cores=False, mpmd_idx=0, tasks=TASKS):
    recorded = tuple(TaskTime(parse_task(name), start, end) for name, start, end in tasks)
    return ProcessTimes(mpmd_idx, 0, Host("node", "clock"), 0, 1, 50_000, 50_001, recorded, on_cores=on_cores)


def spans_of(planes):
    return task_spans(jax.profiler.ProfileData.from_text_proto(text_proto(planes)), 0)


def test_the_work_of_all_streams_within_an_annotation_is_the_task():
    assert spans_of(GPU) == [
        TaskSpan("fwd_0__0", 15_000, 15_500, 24_000),
        TaskSpan("wait for group 1", 26_500, None, None),
        TaskSpan("fwd_0__1", 27_100, 29_000, 34_000),
        TaskSpan("bwd_0__0", 36_200, None, None),
    ]


def test_the_runs_of_programs_are_the_task_where_a_line_has_them():
    assert spans_of(TPU)[:2] == [
        TaskSpan("fwd_0__0", 15_000, 15_800, 24_000),
        TaskSpan("fwd_0__1", 27_100, 28_000, 33_000),
    ]


def test_tasks_get_the_devices_times_by_the_clock_of_the_process():
    (times,) = device_times([process()], spans_of(GPU))
    assert times.has_device_times
    assert [(task.start, task.end) for task in times.tasks] == [
        (10_500, 19_000),
        (24_000, 29_000),
        (31_000, 45_000),  # of which the device has recorded nothing
    ]


def test_times_stay_where_the_trace_has_other_tasks():
    without_last = [span for span in spans_of(GPU) if span.name != "bwd_0__0"]
    assert device_times([process()], without_last) == [process()]


def steps_of(*processes):
    return (RecordedStep(Host("node", "clock"), 0, 60_000, processes),)


def test_each_process_has_its_own_trace():
    content = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text_proto(GPU))
    traces = {"group_0_process_0": {"xplane.pb": content}}
    other = process(mpmd_idx=1)
    (step,) = with_device_times(steps_of(process(), other), traces)
    assert [times.has_device_times for times in step.processes] == [True, False]
    assert step.processes[1] == other
    on_cpu = steps_of(process(on_cores=True))
    assert with_device_times(on_cpu, traces) == on_cpu
    shared = steps_of(process(), other)
    assert with_device_times(shared, {"all_groups": {"xplane.pb": content}}) == shared
    (alone,) = with_device_times(steps_of(process()), {"all_groups": {"xplane.pb": content}})
    assert alone.processes[0].has_device_times


def test_a_trace_that_cannot_be_read_leaves_the_times_as_they_are():
    steps = steps_of(process())
    with pytest.warns(RuntimeWarning, match="the trace of process 0 of group 0 cannot be read"):
        assert with_device_times(steps, {"group_0_process_0": {"xplane.pb": b"no trace"}}) == steps


def test_the_annotations_of_a_real_trace_are_the_recorded_tasks(tmp_path):
    """Of a CPU, whose operations have no plane of their own; names, order and clocks are the same."""
    function = make_step(mse, mpmd.Interleaved1F1B(2, 1))
    with mesh_of(1) as mesh:
        step = mpmd.jit(function, mesh).compile(init(weights(2)), *batch())
        profile = step.profile(init(weights(2)), *batch(), steps=2, trace_dir=tmp_path)
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    spans = task_spans(jax.profiler.ProfileData.from_file(str(path)), 0)
    recorded = [step.processes[0] for step in profile.recorded]
    tasks = [task for times in recorded for task in times.tasks]
    of_tasks = [span for span in spans if span.name in {str(task.task) for task in tasks}]
    assert [span.name for span in of_tasks] == [str(task.task) for task in tasks]
    ahead = min(span.called - task.start for span, task in zip(of_tasks, tasks, strict=True))
    for span, task in zip(of_tasks, tasks, strict=True):
        assert task.start <= span.called - ahead <= task.end
    worked = [
        span._replace(start=task.start + ahead, end=task.end + ahead)
        for span, task in zip(of_tasks, tasks, strict=True)
    ]
    changed = device_times(recorded, worked)
    assert [times.tasks for times in changed] == [times.tasks for times in recorded]
    assert all(times.on_cores and not times.has_device_times for times in recorded)

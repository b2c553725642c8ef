"""The report of a compiled step: what each group does and needs, and how long compiling took."""

import dataclasses

import pytest

import mpmd
from mpmd.explanation import Report, report
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.util.tables import human_bytes
from mpmd.verify import verify
from tests.support.models import ROW_SPECS, batch, init, make_step, mse, weights
from tests.support.parity import mesh_of
from tests.support.plans import sent_values

PASSES = ["trace", "jax", "cut_layers", "split", "shard", "place", "lower", "verify", "resolve", "load"]


@pytest.fixture(scope="module")
def loaded():
    with mesh_of(3) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(3)), mesh)
        yield step.compile(init(weights(3)), *batch())


def test_the_report_is_three_tables(loaded):
    report = loaded.report()
    assert [group.mpmd_idx for group in report.groups] == [0, 1, 2]
    assert all(0 < group.xla_seconds < report.seconds["load"] for group in report.groups)
    lines = str(report).splitlines()
    assert lines[0].split("  ")[-1] == "XLA compile"
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[3].split()[0] == "2"
    assert lines[3].endswith(f"{report.groups[2].xla_seconds:.2f} s")
    assert lines[5].startswith("memory of each device")
    assert lines[6].split()[:3] == ["group", "peak", "parameters"]
    assert lines[6].split()[-2:] == ["temporaries", "during"]
    assert lines[9].split()[0] == "2"
    assert lines[9].endswith(str(report.groups[2].memory.task))
    assert lines[-2].split() == [*PASSES, "total"]
    assert len(lines[-1]) == len(lines[-2])
    assert lines[-1].split()[-1] == f"{sum(report.seconds.values()):.2f}"


@pytest.fixture(scope="module")
def data_parallel():
    """On two groups of two devices, over which the batch is sharded."""
    with mesh_of(2, data=2) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh, in_specs=ROW_SPECS)
        yield step.compile(init(weights(2)), *batch())


def test_one_process_sends_whole_values(data_parallel):
    report = data_parallel.report()
    for group in report.groups:
        values = sent_values(data_parallel.plan, group.mpmd_idx)
        assert group.sent_bytes == sum(value.nbytes for value in values) > 0
        assert group.process_sent_bytes == (group.sent_bytes,)
        assert group.process_bytes == 2 * group.peak_bytes
    assert "by a process" not in str(report)
    for edge in mpmd.explain(data_parallel).edges:
        assert all(value.nbytes == value.count * value.aval.nbytes for value in edge.values)


def test_several_processes_send_what_travels_between_them(data_parallel):
    """Rows stay with their processes. One process of the second group gets all of it from both."""
    shapes = [GroupShape({"stage": 1, "data": 2}, count) for count in (1, 2)]
    plan = data_parallel.plan

    def report_for(*groups):
        return report(plan, Topology(groups), verify(plan), (), {}, {0: 0.0, 1: 0.0}, {}, (None, None)).groups

    for first, second in [(shapes[1], shapes[1]), (shapes[1], shapes[0])]:
        whole = sum(value.nbytes for value in sent_values(plan, 0))
        assert report_for(first, second)[0].process_sent_bytes == (whole // 2, whole // 2)
    text = str(Report(report_for(shapes[1], shapes[1]), 2, {}))
    assert f"{human_bytes(whole)}, {human_bytes(whole // 2)} by a process" in text


def test_the_report_has_what_xla_needs(loaded):
    """And the peaks beside what the allocators have measured, where they measure."""
    report = loaded.report()
    for group in report.groups:
        assert all(executable.memory.outputs > 0 for executable in group.executables)
        assert group.memory.peak.temporaries is not None
        assert group.parameter_bytes == group.memory.peak.parameters
        assert group.process_bytes == group.peak_bytes
        assert group.measured_peak_bytes is None
    measured = [dataclasses.replace(group, measured_peak_bytes=3 * 2**20) for group in report.groups]
    assert "3.0 MiB" not in str(report)
    assert "3.0 MiB" in str(dataclasses.replace(report, groups=tuple(measured)))

"""The report of a compiled step: what each group does and needs, and how long compiling took."""

import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

PASSES = ["trace", "jax", "split", "shard", "place", "lower", "verify", "resolve", "load"]


@pytest.fixture(scope="module")
def loaded():
    with mesh_of(3) as mesh:
        step = mpmd.mpmd_jit_with_loop(make_step(mse, mpmd.Std1F1B(3)), mpmd_mesh=mesh)
        yield step.compile(init(weights(3)), *batch())


def test_every_pass_has_its_seconds(loaded):
    seconds = loaded.report().seconds
    assert list(seconds) == PASSES
    assert all(value > 0 for value in seconds.values())


def test_every_group_has_compiled(loaded):
    report = loaded.report()
    assert [group.mpmd_idx for group in report.groups] == [0, 1, 2]
    assert all(0 < group.xla_seconds < report.seconds["load"] for group in report.groups)


def test_the_report_is_two_tables(loaded):
    report = loaded.report()
    lines = str(report).splitlines()
    assert lines[0].split("  ")[-1] == "XLA compile"
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[3].split()[0] == "2"
    assert lines[3].endswith(f"{report.groups[2].xla_seconds:.2f} s")
    assert lines[-2].split() == [*PASSES, "total"]
    assert len(lines[-1]) == len(lines[-2])
    assert lines[-1].split()[-1] == f"{sum(report.seconds.values()):.2f}"


def test_specs_take_one_trace_and_a_compile():
    """Those of results need the result's shape; activations are sharded as XLA likes, which takes a while."""
    calls = []

    def counted(params, x, y):
        calls.append(x)
        return mse(params, x, y)

    with mesh_of(2, data=2) as mesh:
        step = mpmd.mpmd_jit_with_loop(
            make_step(counted, mpmd.Std1F1B(2)),
            mpmd_mesh=mesh,
            in_specs=(P(), P(None, "data"), P(None, "data")),
            out_specs=P(),
        )
        report = step.compile(init(weights(2)), *batch()).report()
    assert len(calls) == 1
    assert report.seconds["resolve"] > 0.001

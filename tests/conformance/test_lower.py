"""``step.lower`` plans a step without devices, for meshes that are not there."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import mpmd
from mpmd.ir.plan import Task
from mpmd.simulate import Costs
from tests.support.models import ROW_SPECS, batch, mse, planned, sgd_step, weights
from tests.support.parity import assert_close, mesh_of

STEP = sgd_step(mse, mpmd.Std1F1B(3))
SHAPES = jax.eval_shape(lambda: (weights(3), *batch()))


@pytest.fixture(scope="module")
def lowered():
    return planned(STEP, *SHAPES, groups=3)


def test_a_plan_goes_on_to_a_loaded_step(lowered):
    """With the same programs as the step that is compiled at once."""
    with mesh_of(3) as mesh:
        loaded = lowered.compile(mesh)
        at_once = mpmd.jit(STEP, mesh).compile(*SHAPES)
        assert loaded.plan.programs == at_once.plan.programs == lowered.plan.programs
        arguments = weights(3), *batch()
        assert_close(loaded(*arguments), jax.jit(STEP)(*arguments))


def test_report_without_what_xla_knows(lowered):
    report = lowered.report()
    text = str(report)
    assert all(group.peak_bytes > 0 and group.parameter_bytes > 0 for group in report.groups)
    assert "not compiled" in text and "planned in seconds" in text
    assert "XLA compile" not in text and "replicated" not in text
    assert set(report.seconds) == {"trace", "jax", "cut_layers", "split", "shard", "place", "lower", "verify"}


def test_simulation_takes_operations_for_time():
    """A stage with twice as many layers takes twice as long."""

    def loss_fn(params, x, y):
        first, *others = params
        return mse([*others], mpmd.mark_stage_end(product(first, x)), y)

    def product(params, x):
        for _ in range(2):
            x = x @ params["w"]
        return x

    def step(params, xs, ys):
        return mpmd.treduce(
            lambda mb: loss_fn(params, *mb), (xs, ys), schedule=mpmd.ForwardOnly(3, 3), operation=mpmd.Add
        )

    lowered = planned(step, weights(3), *batch(), groups=3)
    simulation = lowered.simulate()
    durations = {
        event.activity: event.duration for event in simulation.events if isinstance(event.activity, Task)
    }
    first, second = durations[Task("fwd", 0, 0)], durations[Task("fwd", 1, 0)]
    assert 1.5 * second < first < 2 * second
    assert lowered.simulate(Costs()).makespan > simulation.makespan
    assert lowered.simulate(operations_per_second=1e11).makespan == pytest.approx(10 * simulation.makespan)


def test_open_shardings_count_as_replicated():
    report = planned(STEP, *SHAPES, groups=3, axes={"data": 2}, in_specs=ROW_SPECS).report()
    assert report.are_specs_open and "count as replicated" in str(report)


def test_groups_of_another_shape_are_refused(lowered):
    with mesh_of(3, data=2) as mesh, pytest.raises(ValueError, match=r"planned for groups .*stage=1"):
        lowered.compile(mesh)


def test_an_abstract_mesh_does_not_run(lowered):
    step = mpmd.jit(STEP, mpmd.AbstractMpmdMesh([{}] * 3))
    for run in (lowered.compile, lambda: step.compile(*SHAPES), lambda: step(weights(3), *batch())):
        with pytest.raises(RuntimeError, match=r"has no devices: step\.lower"):
            run()


def test_shapes_of_groups():
    mesh = mpmd.AbstractMpmdMesh([{"data": 4}, {"data": 2, "model": 2}])
    assert [dict(m.shape) for m in mesh.abstract_submeshes] == [
        {"data": 4, "model": 1},
        {"data": 2, "model": 2},
    ]
    types = (AxisType.Auto, AxisType.Explicit)
    explicit = mpmd.AbstractMpmdMesh(AbstractMesh((2, 4), ("stage", "data"), types), "stage")
    assert [m.axis_types for m in explicit.abstract_submeshes] == [types, types]
    assert explicit.mpmd_dim == 2 and dict(explicit.abstract_submeshes[0].shape) == {"stage": 1, "data": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"stage": 4, "data": 2}, "pipe"), "no axis 'pipe'; its axes are stage, data"),
        (({"stage": 4}, None), "no axis None"),
        (({"stage": 0}, "stage"), "axis 'stage' in shape must be .* not 0"),
        (([],), "shape is a list without any"),
        (([{"data": 2}], "data"), "leave out mpmd_axis_name='data'"),
        (({"stage": 10**30}, "stage"), "devices are more than a mesh can have"),
    ],
)
def test_what_is_no_shape(arguments, message):
    with pytest.raises(ValueError, match=message):
        mpmd.AbstractMpmdMesh(*arguments)


def test_planning_compiles_nothing_with_xla():
    """In a process of its own, whose only backend cannot be had."""
    program = """
import jax, mpmd
def loss(w, x):
    return (mpmd.mark_stage_end(x @ w[0]) @ w[1]).sum()
def step(w, xs):
    return mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, mpmd.Std1F1B(2), operation=mpmd.Add)
shape = jax.ShapeDtypeStruct
mesh = mpmd.AbstractMpmdMesh({"stage": 2}, "stage")
lowered = mpmd.jit(step, mesh).lower([shape((4, 4), "float32")] * 2, shape((3, 2, 4), "float32"))
print(lowered.report(), mpmd.explain(lowered), lowered.simulate().makespan)
"""
    environment = {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": "."}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

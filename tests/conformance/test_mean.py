"""``Mean`` over microbatches, and the helpers that cut batches and layers into even pieces."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import mpmd
from tests.support.models import (
    MICROBATCHES,
    ROW_SPECS,
    batch,
    mse,
    planned,
    sgd_step,
    weights,
)
from tests.support.parity import assert_close, assert_like_jit, mesh_of


def test_a_mean_costs_no_more_than_a_sum():
    """The same accumulators and messages: the division is in the task after the loop."""

    def tasks(operation):
        plan = planned(sgd_step(mse, mpmd.Std1F1B(2), operation), weights(2), *batch()).plan
        return [[str(run.task) for run in program.runs] for program in plan.programs]

    assert tasks(mpmd.Mean) == tasks(mpmd.Add)


def test_means_of_shards_and_of_shared_weights():
    step = sgd_step(lambda params, x, y: mse([params] * 2, x, y), mpmd.Std1F1B(2), mpmd.Mean)
    params = weights(1)[0]
    with mesh_of(2, data=2) as mesh:
        assert_like_jit(mesh, step, params, *batch(), in_specs=ROW_SPECS)


DTYPES = ["bfloat16", "float16", "complex64", "int8", "int32", "uint8", "bool", "float8_e4m3fn"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_dtypes(axis_type):
    """As ``jnp.mean``, but for the order in which a sum in half precision rounds."""
    values = {
        dtype: jnp.array([[1, 0], [1, 1], [0, 1], [2 if "float8" in dtype else 100, 0]]).astype(dtype)
        for dtype in DTYPES
    }

    def step(values):
        return mpmd.treduce(
            lambda v: mpmd.mark_stage_end(v), values, schedule=mpmd.ForwardOnly(1, 1), operation=mpmd.Mean
        )

    groups = jax.make_mesh((1,), ("stage",), (axis_type,), devices=jax.devices()[:1])
    with mpmd.MpmdMesh(groups, "stage") as mesh:
        actual = mpmd.to_host(mpmd.jit(step, mesh)(values))
    assert_close(actual, jax.jit(step)(values), 0)
    for dtype, mean in actual.items():
        expected = jnp.mean(values[dtype], axis=0)
        assert mean.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(mean, "complex64"), np.asarray(expected, "complex64"))


def test_the_largest_of_numbers_without_infinity():
    values = jnp.array([[1, -2], [3, 0.5]]).astype("float8_e4m3fn")
    largest = mpmd.treduce(lambda v: v, values, operation=mpmd.Max)
    assert largest.tolist() == [3, 0.5]


def test_half_precision_does_not_count():
    """bfloat16 has no 257, so the sum stops at 256; but it is divided by 257."""
    ones = jnp.ones(257, jnp.bfloat16)
    mean = mpmd.treduce(lambda x: x, ones, schedule=mpmd.ForwardOnly(1, 1), operation=mpmd.Mean)
    assert mean.dtype == jnp.bfloat16
    assert float(mean) == float(jnp.bfloat16(256 / 257)) < 1


# Microbatches.


def test_microbatches_are_consecutive_rows():
    data = {"x": np.arange(24).reshape(12, 2), "y": jnp.arange(12)}
    cut = mpmd.microbatches(data, 3)
    np.testing.assert_array_equal(cut["x"][1], data["x"][4:8])
    np.testing.assert_array_equal(cut["y"][2], data["y"][8:])
    assert isinstance(cut["x"], np.ndarray) and np.shares_memory(cut["x"], data["x"])
    shapes = jax.eval_shape(lambda batch: mpmd.microbatches(batch, MICROBATCHES), data)
    assert shapes["x"].shape == (MICROBATCHES, 3, 2)


@pytest.mark.parametrize(
    ("data", "n", "error", "message"),
    [
        (
            {"x": np.zeros((6, 2))},
            4,
            ValueError,
            r"6 rows do not divide into 4 .*batch\['x'\] has shape \(6, 2\)",
        ),
        ((np.zeros(4), np.zeros(8)), 2, ValueError, r"same number of rows, and batch\[0\] has shape \(4,\)"),
        (
            {"x": np.zeros(4), "n": np.float32(1)},
            2,
            ValueError,
            r"batch\['n'\] has shape \(\): there are no rows",
        ),
        ([np.float32(0)] * 9, 2, ValueError, r"^batch\[0\] has .*batch\[4\] has .* … 9 in all.*np\.asarray"),
        ([[1, 2], [3, 4]], 2, TypeError, r"batch\[0\]\[0\] is of type int, .*np.asarray makes"),
        (np.zeros((0, 2)), 2, ValueError, "0 rows do not divide"),
        ((), 2, ValueError, "no array"),
    ],
)
def test_what_cannot_be_cut(data, n, error, message):
    with pytest.raises(error, match=message):
        mpmd.microbatches(data, n)


# Layers.


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(30, 4, [8, 8, 7, 7]), (8, 4, [2, 2, 2, 2]), (5, 5, [1] * 5), (3, 1, [3]), (7, 3, [3, 2, 2])],
)
def test_stage_ends(layers, stages, sizes):
    ends = mpmd.stage_ends(layers, stages)
    bounds = [-1, *ends, layers - 1]
    assert [b - a for a, b in itertools.pairwise(bounds)] == sizes


def test_stages_without_layers():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        mpmd.stage_ends(3, 4)

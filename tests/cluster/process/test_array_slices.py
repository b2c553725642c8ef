"""Slices of arrays, and arrays of slices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.process import array_slices
from cluster.process.array_slices import assemble, put_together_on_device, slice_of
from mpmd.ir.plan import Aval

WHOLE = np.arange(64, dtype=np.float32).reshape(8, 8)


def sharding(*spec):
    return NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P(*spec))


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (None, ("a", "b"))], ids=str)
@pytest.mark.parametrize(
    "box", [((0, 8), (0, 8)), ((4, 8), (0, 8)), ((2, 6), (1, 7)), ((0, 1), (0, 1))], ids=str
)
def test_a_part_within_a_device_or_across_several(spec, box):
    expected = WHOLE[tuple(slice(*interval) for interval in box)]
    np.testing.assert_array_equal(slice_of(jax.device_put(WHOLE, sharding(*spec)), box), expected)
    np.testing.assert_array_equal(slice_of(WHOLE, box), expected)


def test_the_part_of_a_scalar_is_an_array():
    assert isinstance(slice_of(np.array(2.0), ()), np.ndarray)
    assert isinstance(slice_of(jax.device_put(np.array(2.0), sharding()), ()), np.ndarray)


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (None, ("b", "a"))], ids=str)
@pytest.mark.parametrize("rows", [8, 4, 2, 1])
def test_an_array_of_parts_that_are_larger_or_smaller_than_its_shards(spec, rows):
    found = {((i, i + rows), (0, 8)): WHOLE[i : i + rows] for i in range(0, 8, rows)}
    array = assemble(Aval((8, 8), "float32", 4), sharding(*spec), found)
    assert array.sharding == sharding(*spec)
    np.testing.assert_array_equal(array, WHOLE)


def test_an_empty_array_has_no_parts():
    assert assemble(Aval((0, 3), "float32", 4), sharding(), {}).shape == (0, 3)


@pytest.mark.parametrize("box", [((0, 8), (0, 8)), ((1, 7), (2, 8))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_device_puts_slices_together_as_the_host_does(box, dtype):
    whole = jax.numpy.asarray(WHOLE % 2, dtype)
    held = tuple(((i, i + 4), (j, j + 4)) for i in (0, 4) for j in (0, 4))
    arrays = [whole[tuple(slice(*interval) for interval in piece)] for piece in held]
    found = put_together_on_device(arrays, box, held)
    assert found.dtype == whole.dtype
    np.testing.assert_array_equal(found, whole[tuple(slice(*interval) for interval in box)])


@pytest.mark.parametrize("spec", [(), ("a",), (None, ("b", "a"))], ids=str)
def test_an_array_of_slices_on_an_accelerator(monkeypatch, spec):
    """Devices of the host stand in for accelerators. Of small messages, slices are in the host's memory."""
    monkeypatch.setattr(array_slices, "is_on_host", lambda array: isinstance(array, np.ndarray))
    found = {((i, i + 1), (0, 8)): WHOLE[i : i + 1] for i in range(8)}
    found |= {box: jax.device_put(found[box], jax.devices()[1]) for box in list(found)[::3]}
    np.testing.assert_array_equal(assemble(Aval((8, 8), "float32", 4), sharding(*spec), found), WHOLE)
    array = jax.device_put(WHOLE, sharding("a", "b"))
    piece = slice_of(array, ((2, 6), (1, 7)))
    assert isinstance(piece, jax.Array)
    np.testing.assert_array_equal(piece, WHOLE[2:6, 1:7])

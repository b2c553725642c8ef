"""Each process is sent what its devices hold of host arrays, from which it makes its part of the array."""

import dataclasses

import numpy as np
import pytest

import mpmd
from cluster.driver.arguments import HostArguments
from cluster.protocol.packing import unpack
from mpmd.ir.plan import Aval
from mpmd.ir.reshard import GroupShape, box_of, boxes_by_process, intersection, within
from mpmd.runtime.requests import StepRequest
from tests.support.plans import pipeline_plan

ARRAY = np.arange(64, dtype=np.float32).reshape(8, 8)
SHAPE = GroupShape({"x": 2, "y": 2}, 2)


def packed(spec, array=ARRAY, shape=SHAPE):
    """The slices that each process is sent of an array that is the argument of a group."""
    plan = pipeline_plan(mpmd.ForwardOnly(1, 1), 1)
    leaf = dataclasses.replace(plan.inputs[0], aval=Aval(array.shape, str(array.dtype), array.itemsize))
    plan = dataclasses.replace(plan, inputs=(dataclasses.replace(leaf, name="w", spec=spec),))
    arguments = HostArguments(plan, (shape,))
    request = StepRequest(program=0, step=0, inputs=(7,), outputs=(), host_arrays={7: array})
    return [arguments.packed(0, rank, request)[7] for rank in range(shape.num_processes)]


def sizes(values):
    return [sum(packed.bits.size for _, packed in value.slices) for value in values]


@pytest.mark.parametrize(
    "spec", [("x",), (None, "x"), (("x", "y"),), ("y", "x"), (None, ("y", "x"))], ids=str
)
def test_each_process_gets_its_part_and_finds_its_devices_parts_in_it(spec):
    values = packed(spec)
    assert sizes(values) == [32, 32]
    for value, boxes in zip(values, boxes_by_process(ARRAY.shape, spec, SHAPE), strict=True):
        slices = {box_of(i, value.shape): unpack(array) for i, array in value.slices}
        for box in boxes:
            held, whole = next((s, a) for s, a in slices.items() if intersection(s, box) == box)
            index = tuple(slice(*interval) for interval in box)
            np.testing.assert_array_equal(whole[within(box, held)], ARRAY[index])


def test_parts_that_lie_side_by_side_travel_as_one_view():
    first, second = packed((("x", "y"),))
    ((_, rows),) = first.slices
    assert np.shares_memory(unpack(rows), ARRAY)
    assert len(second.slices) == 1


@pytest.mark.parametrize("spec", [(), ("y",)], ids=str)
def test_what_all_processes_need_is_sent_whole(spec):
    for value in packed(spec):
        ((index, array),) = value.slices
        assert index is None
        assert np.shares_memory(unpack(array), ARRAY)


def test_arrays_without_elements_and_groups_of_one_process_get_arrays_whole():
    assert [value.slices[0][0] for value in packed(("x",), array=ARRAY[:0])] == [None, None]
    assert packed(("x",), shape=GroupShape({"x": 4}))[0].slices[0][0] is None

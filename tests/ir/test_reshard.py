"""Which parts of a value travel between groups: exactly those that the reader needs, each once."""

import itertools
import math
from unittest import mock

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.ir import reshard
from mpmd.ir.plan import Aval
from mpmd.ir.reshard import (
    GroupShape,
    Transfer,
    boxes_by_process,
    landing_spec,
    transfers,
    volume,
)

AXES = "abc"


def aval(*shape):
    return Aval(shape, "float32", 4)


@st.composite
def groups(draw):
    axes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in AXES[: draw(st.integers(1, 3))]}
    size = math.prod(axes.values())
    return GroupShape(axes, draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])))


@st.composite
def specs(draw, group, ndim):
    entries = [()] * ndim
    for axis in draw(st.permutations(list(group.axes))):
        if entries and draw(st.booleans()):
            dimension = draw(st.integers(0, ndim - 1))
            entries[dimension] = (*entries[dimension], axis)
    return tuple(entries)


@st.composite
def pairs(draw):
    ndim = draw(st.integers(0, 3))
    src, dst = draw(groups()), draw(groups())
    src_spec, dst_spec = draw(specs(src, ndim)), draw(specs(dst, ndim))
    parts = [
        math.lcm(
            *(math.prod(g.axes[axis] for axis in spec[d]) for g, spec in ((src, src_spec), (dst, dst_spec)))
        )
        for d in range(ndim)
    ]
    shape = tuple(n * draw(st.integers(0 if n == 1 else 1, 3)) for n in parts)
    itemsize = draw(st.sampled_from([1, 2**14]))  # the large one has replicas share the sending
    return Aval(shape, "bytes", itemsize), src_spec, src, dst_spec, dst


def mask(boxes, shape):
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(*interval) for interval in box)] += 1
    return counts


@given(pairs())
def test_every_reader_gets_each_element_it_holds_once_from_one_that_has_it(pair):
    value, src_spec, src, dst_spec, dst = pair
    found = transfers(*pair)
    held, wanted = (boxes_by_process(value.shape, spec, g) for spec, g in ((src_spec, src), (dst_spec, dst)))
    for process, boxes in enumerate(wanted):
        received = mask([t.box for t in found if t.dst == process], value.shape)
        np.testing.assert_array_equal(received, mask(set(boxes), value.shape))
    for t in found:
        assert mask(held[t.src], value.shape)[tuple(slice(*interval) for interval in t.box)].all()


@given(pairs())
def test_what_a_group_gathers_travels_to_it_once(pair):
    """Where a dimension divides by as many devices as there are."""
    value, src_spec, src, dst_spec, dst = pair
    shape = tuple(
        size * math.prod(dst.axes.values()) if d == 0 else size for d, size in enumerate(value.shape)
    )
    value = Aval(shape, value.dtype, value.itemsize)
    with mock.patch.object(reshard, "GATHERED_BYTES", 0):
        landing = landing_spec(value, dst_spec, dst)
    if not shape:
        assert landing == dst_spec
        return
    for entry, finer in itertools.zip_longest(dst_spec, landing, fillvalue=()):
        assert finer[: len(entry)] == entry
    found = transfers(value, src_spec, src, landing, dst)
    assert sum(volume(t.box) for t in found) == math.prod(shape)
    np.testing.assert_array_equal(mask([t.box for t in found], shape), np.ones(shape, int))


def test_what_does_not_divide_travels_to_each():
    group = GroupShape({"x": 4, "y": 3}, 12)
    with mock.patch.object(reshard, "GATHERED_BYTES", 0):
        assert landing_spec(aval(5, 6), (), group) == ((), ("y",))
        assert landing_spec(aval(5, 7), (), group) == ()
        assert landing_spec(aval(8), ("x",), group) == ("x",)
        assert landing_spec(aval(24), ("x",), group) == (("x", "y"),)


def test_only_large_values_of_several_processes_are_gathered():
    whole = aval(1024, 1024)
    assert landing_spec(whole, (), GroupShape({"x": 2}, 2)) == (("x",), ())
    assert landing_spec(aval(1023, 1024), (), GroupShape({"x": 3}, 3)) == ()
    assert landing_spec(whole, (), GroupShape({"x": 2})) == ()
    # Each of two processes has both of the devices along "y".
    assert landing_spec(whole, (), GroupShape({"x": 2, "y": 2}, 2)) == (("x",), ())


def test_boxes_are_those_of_jax():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(AXES))
    for spec in [(), ("a",), (None, "b"), (("a", "c"), "b"), (("c", "a"),), ("b", ("a", "c"))]:
        indices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map((8, 8))
        theirs = [(tuple(s.indices(8)[:2] for s in indices[device]),) for device in mesh.devices.flat]
        assert list(boxes_by_process((8, 8), spec, GroupShape(dict(mesh.shape), 8))) == theirs


def test_one_process_sends_one_part_however_its_devices_share_it():
    one, other = GroupShape({"x": 4}), GroupShape({"x": 2})
    assert transfers(aval(8, 8), ("x",), one, (None, "x"), other) == [Transfer(0, 0, ((0, 8), (0, 8)))]


def test_replicas_share_the_sending_of_large_values_only():
    two, one = GroupShape({"x": 2}, 2), GroupShape({"x": 1})
    large = transfers(aval(1024, 64), (), two, (), one)
    assert [(t.src, volume(t.box)) for t in large] == [(0, 2**15), (1, 2**15)]
    assert len(transfers(aval(64), (), two, (), one)) == 1
    small = transfers(aval(64), (), two, (), two)
    assert [(t.src, t.dst) for t in small] == [(0, 0), (1, 1)]
    to_each = transfers(aval(1024, 64), (), two, (), two)
    assert [(t.src, t.dst, volume(t.box)) for t in to_each] == [(0, 0, 2**16), (1, 1, 2**16)]

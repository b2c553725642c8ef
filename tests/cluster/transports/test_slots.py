"""Slots of shared memory and the layout of messages in them."""

import gc
import os

import jax
import ml_dtypes
import numpy as np
import pytest

from cluster.transports.layouts import decode_layout, layout_of
from cluster.transports.shared_memory.slots import allocate, map_slots, slot_size

TYPES = ((np.dtype("float32"), (3, 5)), (np.dtype(bool), ()), (np.dtype(ml_dtypes.bfloat16), (0, 4)))


def test_values_are_aligned_and_do_not_overlap():
    layout = layout_of(TYPES)
    assert [value.offset for value in layout.values] == [0, 64, 128]
    assert layout.nbytes == 128
    page = os.sysconf("SC_PAGE_SIZE")
    assert slot_size(layout.nbytes) == page
    assert slot_size(page) == 2 * page


def test_types_are_the_same_when_they_are_decoded():
    dtypes = ["int64", "complex64", ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn, "float16"]
    types = TYPES + tuple((np.dtype(dtype), (i,) * i) for i, dtype in enumerate(dtypes))
    for each in (types, ()):
        assert decode_layout.__wrapped__(layout_of(each).types) == layout_of(each)


@pytest.mark.parametrize("dtype", [object, ">f4", [("a", "i4")]], ids=str)
def test_a_dtype_that_its_name_does_not_say_cannot_be_sent(dtype):
    with pytest.raises(TypeError, match="cannot be sent"):
        layout_of(((np.dtype(dtype), ()),))


@pytest.fixture
def ends():
    """Both ends of a slot."""
    size = slot_size(layout_of(TYPES).nbytes)
    descriptor = allocate(size)
    yield tuple(map_slots(descriptor, size, 0)[0] for _ in range(2))
    os.close(descriptor)


def test_a_slot_is_free_again_when_all_lent_arrays_are_dead(ends):
    sender, reader = ends
    layout = layout_of(TYPES)
    assert sender.free
    for value in sender.occupy(layout)[0]:
        value[...] = 1
    matrix, flag, empty = reader.lend(reader.content(layout.nbytes), layout)
    assert (matrix.sum(), bool(flag), empty.shape, empty.dtype) == (15, True, (0, 4), ml_dtypes.bfloat16)
    assert not matrix.flags.writeable
    del flag, empty
    row = matrix[1]
    del matrix
    assert not sender.free
    del row
    assert sender.free


@pytest.mark.usual("put")
@pytest.mark.parametrize("how", ["put", "run", "donated"])
def test_a_slot_is_held_while_jax_reads_it(ends, how):
    sender, reader = ends
    types = ((np.dtype("float32"), (512,)),)
    layout = layout_of(types)
    (written,), _ = sender.occupy(layout)
    written[...] = 3
    (value,) = reader.lend(reader.content(layout.nbytes), layout)
    if how == "put":
        array = jax.device_put(value)
        assert array.unsafe_buffer_pointer() == value.ctypes.data, "nothing is copied"
    else:
        donated = 0 if how == "donated" else ()
        (array,) = jax.jit(lambda x: (x * 2,), donate_argnums=donated)(value)
        assert (value == 3).all(), "what was received is not written to"
    del value
    expected = 3 if how == "put" else 6
    assert (np.asarray(array) == expected).all()
    del array
    gc.collect()
    jax.device_put(0.0)  # JAX lets go of host memory when it is next called
    assert sender.free

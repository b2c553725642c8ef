"""Arrays are packed for pickling."""

import ml_dtypes
import numpy as np
import pytest

from cluster.protocol.packing import pack, unpack


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", ml_dtypes.bfloat16, ml_dtypes.int4])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_packing_keeps_arrays_and_copies_nothing(dtype, shape):
    array = np.ones(shape, dtype)
    packed = pack(array)
    assert packed.bits.dtype.isbuiltin == 1
    assert packed.bits.size == 0 or np.shares_memory(packed.bits, array)
    again = unpack(packed)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(again, array)

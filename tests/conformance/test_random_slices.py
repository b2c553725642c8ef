"""Random programs over slices of sequences compute what plain JAX computes."""

import pytest
from hypothesis import given

from tests.support.effort import costly
from tests.support.parity import assert_parity, mesh_of
from tests.support.random_programs.slices import data_of, sliced_programs, sliced_step, state_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


def check(program):
    assert_parity(
        sliced_step(program),
        state_of(program),
        *data_of(program),
        mesh=mesh_of(program.make_schedule().mpmd_dim),
        tolerance=0.05 if program.half else 1e-4,
        donate_argnums=0 if program.donate else (),
    )


@costly
@given(sliced_programs())
def test_random_slices(program):
    check(program)

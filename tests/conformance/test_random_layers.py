"""Random programs of scanned layers, and of slices of sequences, compute what plain JAX computes."""

import pytest
from hypothesis import given

from tests.support.effort import costly
from tests.support.models import batch
from tests.support.parity import assert_parity, mesh_of
from tests.support.random_programs import scans, slices

pytestmark = pytest.mark.usefixtures("quick_compiles")


def check(program, step, state, data, groups):
    assert_parity(
        step,
        state,
        *data,
        mesh=mesh_of(groups),
        tolerance=0.05 if program.half else 1e-4,
        donate_argnums=0 if program.donate else (),
    )


@costly
@given(scans.scanned_programs())
def test_random_scans(program):
    check(program, scans.scanned_step(program), scans.state_of(program), batch(2), program.stages)


@costly
@given(slices.sliced_programs())
def test_random_slices(program):
    groups = program.make_schedule().mpmd_dim
    check(program, slices.sliced_step(program), slices.state_of(program), slices.data_of(program), groups)

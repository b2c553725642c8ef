"""Programs on a part of a mesh compute what plain JAX computes, beside another part."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.covering import COVERING
from tests.support.parity import assert_case_on, assert_close
from tests.support.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("quick_compiles")


def mesh_with_another_part(groups, axes):
    """A mesh whose part ``model`` comes after a group of other axes."""
    names = ("stage", *axes)
    devices = iter(jax.devices())

    def submesh(sizes):
        shape = (1, *sizes)
        return jax.sharding.Mesh(
            np.array([next(devices) for _ in range(math.prod(shape))]).reshape(shape), names
        )

    submeshes = [submesh([1] * len(axes)), *(submesh(axes.values()) for _ in range(groups))]
    return mpmd.MpmdMesh(submeshes, parts={"other": 1, "model": groups})


USUAL = "mlp_under_a_schedule[GPipe]", "counts_and_keys"


@pytest.mark.usual(*USUAL)
@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if program.name in {*USUAL, *COVERING}],
    ids=lambda program: program.name,
)
def test_program(program):
    case = program.case()
    if 1 + case.groups * math.prod(case.axes.values()) > len(jax.devices()):
        pytest.skip("it needs all devices of this process")
    with mesh_with_another_part(case.groups, case.axes) as mesh:
        part = mesh.part("model")
        loaded = assert_case_on(part, case)
        if case.holds:
            case.holds(loaded)
        # A copy of the state from the host, and from groups, is where the step reads it, and has its bits.
        state = mpmd.reshard(case.state, to=loaded)
        assert_close(state, jax.tree.map(jnp.asarray, case.state), 0)
        again = mpmd.reshard(state, to=loaded)
        assert_close(again, jax.tree.map(jnp.asarray, case.state), 0)
        for array in jax.tree.leaves(again):
            assert set(array.mpmd_idxs) <= set(part.mpmd_idxs)

"""Arrays in parts are saved and restored as one array."""

import jax
import numpy as np
import orbax.checkpoint as ocp

import mpmd
from tests.support.digests import digests
from tests.support.models import batch
from tests.support.parity import mesh_of
from tests.support.stacked_state import compiled, initial_state


def sizes(array):
    return [part.shape[0] for part in array.parts]


def test_what_groups_save_in_parts_others_restore_in_other_parts(tmp_path):
    with mesh_of(3) as mesh:
        step = compiled(mesh, mpmd.Std1F1B(3), every=(4, 1, 2))
        state, _ = step(initial_state(), *batch())
        assert sizes(state[0]["layers"]["w"]) == [4, 1, 2]
        mpmd.save(tmp_path / "saved", state)
        expected = digests(mpmd.to_host(state))
        again = step.restore(tmp_path / "saved")
        assert digests(mpmd.to_host(again)) == expected
        places = [leaf.placement for leaf in jax.tree.leaves(state)]
        assert [leaf.placement for leaf in jax.tree.leaves(again)] == places
        loss = float(step(again, *batch())[1])
    with mesh_of(2) as mesh:
        step = compiled(mesh, mpmd.Std1F1B(2), num_stages=2)
        moved = step.restore(tmp_path / "saved")
        assert sizes(moved[0]["layers"]["w"]) == [4, 3] and moved[2].placement.stack.sizes == (4, 3)
        assert digests(mpmd.to_host(moved)) == expected
        np.testing.assert_allclose(float(step(moved, *batch())[1]), loss, rtol=1e-5)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), initial_state())
    plain = ocp.StandardCheckpointer().restore(tmp_path / "saved", target)
    assert digests(plain) == expected

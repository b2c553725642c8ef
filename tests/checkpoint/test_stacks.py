"""Arrays in parts are saved and restored as one array."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpmd
from tests.support.models import CLIPPED_ADAM, batch, init
from tests.support.parity import assert_close, mesh_of, raw
from tests.support.programs.scanned_layers import scanned, squares, stacked


def loss_of(**spread):
    def loss(params, x, y):
        def body(carry, p):
            h, key = carry
            return mpmd.mark_stage_end((jnp.tanh(h @ p["w"] + p["b"]), key), **spread)

        return squares(scanned(body, (x, params["key"]), params["layers"])[0], y)

    return loss


def compiled(mesh, spread, stages, layers=7):
    loss = loss_of(**spread)
    keys = jax.random.split(jax.random.key(3), layers)

    def step(state, xs, ys):
        params, opt_state, keys = state

        def of(params, x, y):
            weights = {**params, "layers": {**params["layers"], "key": keys}, "key": 0.0}
            return loss(weights, x, y)

        def with_keys(mb):
            return jax.value_and_grad(of)(params, *mb)

        value, grads = mpmd.treduce(with_keys, (xs, ys), mpmd.Std1F1B(stages), operation=mpmd.Add)
        updates, opt_state = CLIPPED_ADAM.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        return (params, opt_state, keys), value

    state = (*init(stacked(layers), CLIPPED_ADAM), keys)
    return mpmd.mpmd_jit_with_loop(step, mesh).compile(state, *batch()), state


@pytest.mark.parametrize("spread", [{"every": (1, 4, 2)}], ids=str)
def test_what_groups_save_in_parts_others_restore_in_other_parts(spread, tmp_path):
    with mesh_of(3) as mesh:
        step, state = compiled(mesh, spread, 3)
        state, _ = step(state, *batch())
        expected, loss = mpmd.to_host(state), step(state, *batch())[1]
        assert [part.shape[0] for part in state[0]["layers"]["w"].parts] == [1, 4, 2]
        mpmd.save(tmp_path / "saved", state)
        again = step.restore(tmp_path / "saved")
        assert again[0]["layers"]["w"].placement == state[0]["layers"]["w"].placement
        assert_close(again, expected, tolerance=0)
    with mesh_of(2) as mesh:
        step, _ = compiled(mesh, {"num_stages": 2}, 2)
        moved = step.restore(tmp_path / "saved")
        assert [part.shape[0] for part in moved[0]["layers"]["w"].parts] == [4, 3]
        assert_close(moved, expected, tolerance=0)
        np.testing.assert_allclose(step(moved, *batch())[1], loss, rtol=1e-5)
    plain = ocp.StandardCheckpointer().restore(tmp_path / "saved")
    for here, there in zip(jax.tree.leaves(expected), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(raw(here), raw(there))

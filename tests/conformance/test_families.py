"""Every family of schedules trains with the numbers of plain JAX."""

import jax
import numpy as np
import pytest

import mpmd
from mpmd.schedules.families import FAMILIES, build
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of

TRAINING = [name for name in FAMILIES if name != "ForwardOnly"]


@pytest.mark.usual("ZeroBubbleH2-2-5", "KimiK2-2-5", "DualPipeV-2-5")
@pytest.mark.parametrize(("groups", "microbatches"), [(2, 5), (3, 2)])
@pytest.mark.parametrize("name", TRAINING)
def test_training(name, groups, microbatches):
    schedule = build(name, groups)
    state = init(weights(schedule.num_stages))
    loaded = assert_parity(make_step(mse, schedule), state, *batch(microbatches), mesh=mesh_of(groups))
    parameters = [leaf for leaf in loaded.plan.inputs if leaf.path.startswith("args[0][0]")]
    assert all(len(leaf.mpmd_idxs) == 1 for leaf in parameters)


def test_a_fused_steady_state():
    step = make_step(mse, mpmd.Eager1F1B(3, fuse_steady_state=True))
    loaded = assert_parity(step, init(weights(3)), *batch(5), mesh=mesh_of(3))
    assert any("+bwd" in executable.name for executable in loaded.plan.executables)


def test_forward_only_evaluates_and_refuses_gradients():
    def evaluate(params, xs, ys):
        return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), mpmd.ForwardOnly(3, 3), operation=mpmd.Add)

    xs, ys = batch(5)
    with mesh_of(3) as mesh:
        compiled = mpmd.jit(evaluate, mpmd_mesh=mesh)
        expected = jax.jit(evaluate)(weights(3), xs, ys)
        np.testing.assert_allclose(np.asarray(compiled(weights(3), xs, ys)), expected, rtol=1e-6)
        training = mpmd.jit(make_step(mse, mpmd.ForwardOnly(3, 3)), mpmd_mesh=mesh)
        with pytest.raises(
            mpmd.CompileError, match=r"runs forwards only, but the loop at .* takes gradients"
        ):
            training(init(weights(3)), xs, ys)

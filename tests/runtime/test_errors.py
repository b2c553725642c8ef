"""Bad input and failing tasks: each has an error that says what, where and what to do."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.runtime.lost_values import LostValueError
from tests.support.parity import mesh_of

WIDTH = 4
PARAMS = [np.eye(WIDTH, dtype=np.float32) * (i + 1) for i in range(4)]
XS = np.ones((4, 2, WIDTH), np.float32)


def layers(params, x, marks):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        if i in marks:
            x = mpmd.mark_stage_end(x)
    return x


def step_of(loss_fn, schedule=None):
    schedule = schedule or mpmd.Std1F1B(2)

    def step(params, xs):
        loss, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_fn)(params, x), xs, schedule=schedule, operation=mpmd.Add
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def exploding(params, x):
    """A loss that fails between its two stages."""

    def explode(h):
        raise ArithmeticError("too hot")

    h = mpmd.mark_stage_end(x @ params[0])
    h = jax.pure_callback(explode, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h))
    return jnp.mean(h) + jnp.mean(params[1])


def test_loop_inputs_of_different_length_and_without_microbatches():
    def step(params, xs):
        return params, mpmd.treduce(
            lambda mb: jnp.sum(mb[0]), (xs, xs[:1]), schedule=mpmd.GPipe(1), operation=mpmd.Add
        )

    for call in (jax.jit(step), mpmd.jit(step, mpmd_mesh=mesh_of(1)).compile):
        with pytest.raises(
            ValueError, match=r"xs\[0\] with shape \(4, 2, 4\), xs\[1\] with shape \(1, 2, 4\)"
        ):
            call(PARAMS, XS)
        with pytest.raises(ValueError, match="length must be a whole number of at least 1, not 0"):
            call(PARAMS, XS[:0])


@pytest.mark.parametrize(
    ("in_specs", "said"),
    [
        (
            (P(), P("nowhere")),
            "which names the axis 'nowhere', but no group has it; the axes of a group are: data",
        ),
        ((P(), P("stage")), "along which the groups are"),
        (
            (P(None, None, "data"), P()),
            "has the spec P(None, None, 'data'), which has more entries than the 2",
        ),
    ],
)
def test_specs_that_do_not_fit(in_specs, said):
    step = step_of(lambda p, x: jnp.mean(layers(p, x, (0,))))
    with mesh_of(2, data=2) as mesh, pytest.raises(mpmd.CompileError) as caught:
        mpmd.jit(step, mpmd_mesh=mesh, in_specs=in_specs).compile(PARAMS, XS)
    assert said in str(caught.value)


def test_what_is_no_spec():
    with mesh_of(2, data=2) as mesh, pytest.raises(TypeError, match="in_specs must have PartitionSpecs"):
        mpmd.jit(lambda x: x, mesh, in_specs="data")


def test_specs_that_do_not_divide_are_all_named():
    step = step_of(lambda p, x: jnp.mean(layers(p, x, (0,))))
    with mesh_of(2, data=3) as mesh, pytest.raises(mpmd.CompileError) as caught:
        mpmd.jit(step, mpmd_mesh=mesh, in_specs=(P("data"), P())).compile(PARAMS, XS)
    assert len(caught.value.faults) == 4
    assert "args[0][0] with shape (4, 4)" in caught.value.faults[0]
    assert (
        "dimension 0 of size 4 does not divide by 3, the devices along 'data', on group 0, whose"
        in (caught.value.faults[0])
    )
    assert caught.value.faults[0].endswith("shard another dimension, or pad this one")


def test_mesh_without_the_axis():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(ValueError, match="no axis mpmd_axis_name='stage'; its axes are x"):
        mpmd.MpmdMesh(mesh, "stage")


@pytest.mark.parametrize("donate_argnums", [None, 0])
def test_the_error_of_a_lost_value_says_what_would_have_kept_the_arguments(donate_argnums):
    with mesh_of(2) as mesh:
        step = mpmd.jit(step_of(exploding), mesh, donate_argnums=donate_argnums)
        params, _ = step([jnp.copy(p) for p in PARAMS[:2]], XS)
        params, total = step(params, XS)
        with pytest.raises(LostValueError, match="too hot") as caught:
            float(total)
    said = "without donate_argnums they would still be there" in str(caught.value)
    assert said == (donate_argnums is not None)
    assert "Recovery" not in str(caught.value), "which groups of one process cannot have"


def test_a_lost_value_keeps_its_reason_through_later_steps_and_other_processes():
    with mesh_of(2) as mesh:
        compiled = mpmd.jit(step_of(exploding), mpmd_mesh=mesh)
        params = PARAMS[:2]
        for _ in range(3):
            params, _ = compiled(params, XS)
        with pytest.raises(LostValueError) as caught:
            params[1].block_until_ready()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error).count("lost when an earlier step failed") == 1
        assert "too hot" in error.reason


def test_small_results_of_a_closed_mesh_can_be_read_and_passed():
    with mesh_of(2) as mesh:
        step = mpmd.jit(lambda small, large: (small + 1, large + 1), mesh)
        small, large = jax.block_until_ready(step(jnp.ones(64), jnp.ones(65)))
    assert np.array_equal(small, np.full(64, 2.0))
    with mesh:
        assert np.array_equal(mpmd.jit(lambda x: 2 * x, mesh)(mpmd.to_host(small)), np.full(64, 4.0))
        with pytest.raises(RuntimeError, match="the mesh was closed, and the values on it are gone"):
            np.asarray(large)


def test_concat_along_an_axis_that_is_not_there():
    def step(xs):
        return mpmd.treduce(jnp.sum, xs, schedule=mpmd.GPipe(1), operation=mpmd.Concat(axis=3))

    with pytest.raises(ValueError, match=r"Concat\(axis=3\) cannot stack values of shape \(\)"):
        jax.eval_shape(step, XS)

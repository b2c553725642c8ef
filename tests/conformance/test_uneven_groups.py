"""Groups whose submeshes have different sizes compute what plain JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import BATCH, batch, init, layer, make_step, mlp, mse, sgd_step, squares, weights
from tests.support.parity import assert_parity, uneven_mesh_of
from tests.support.programs.submeshes import like_parameters

ADAM = optax.adam(1e-2, eps=1e-3)
ROWS = P(None, "data")
"""Of a batch (microbatches, rows, width): the rows."""

SHAPES = {
    "fewer rows": ({"data": 4, "model": 1}, {"data": 2, "model": 1}),
    "one device, then more": ({"data": 1, "model": 1}, {"data": 4, "model": 1}),
    "data, then data and model": ({"data": 4, "model": 1}, {"data": 2, "model": 2}),
    "model, then data": ({"data": 1, "model": 4}, {"data": 4, "model": 1}),
}


@pytest.mark.usual("sharded-fewer rows")
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("spec", [P(), P("data", "model")], ids=["replicated", "sharded"])
def test_two_stages(shapes, spec):
    state = init(weights(2), ADAM)
    loaded = assert_parity(
        make_step(mse, mpmd.Std1F1B(2), ADAM),
        state,
        *batch(),
        mesh=uneven_mesh_of(*shapes),
        in_specs=(like_parameters(state, spec), ROWS, ROWS),
        donate_argnums=0,
    )
    assert loaded.plan.submeshes == tuple(tuple(shape.items()) for shape in shapes)


def mixed(local, h, p):
    """``local`` on rows of ``h``, with each device's rows of the weight."""
    spec = P("data")
    return jax.shard_map(local, in_specs=(spec, spec, P()), out_specs=spec)(h, p["w"], p["b"])


def gathered(h, w, b):
    """A layer whose weight is gathered: the loop over the axis has its size."""
    assert h.shape[0] * jax.lax.axis_size("data") == BATCH
    return jnp.tanh(h @ jax.lax.all_gather(w, "data", tiled=True) + b)


def loss_with_shard_maps(wrap):
    def loss(params, x, y):
        if jax.sharding.get_abstract_mesh().empty:
            return mse(params, x, y)
        run = wrap(lambda h, p: mixed(gathered, h, p))
        return squares(run(mpmd.mark_stage_end(run(x, params[0])), params[1]), y)

    return loss


SHARDED = [{"w": P("data"), "b": P()}] * 2


@pytest.mark.usual("checkpointed")
@pytest.mark.parametrize(
    "wrap", [mpmd.per_group, lambda f: jax.checkpoint(mpmd.per_group(f))], ids=["plain", "checkpointed"]
)
def test_a_shard_map_is_traced_for_each_group(wrap):
    assert_parity(
        sgd_step(loss_with_shard_maps(wrap), mpmd.Std1F1B(2)),
        weights(2),
        *batch(),
        mesh=uneven_mesh_of(*SHAPES["fewer rows"]),
        in_specs=(SHARDED, ROWS, ROWS),
    )


def refused(step, shapes, **options):
    """The error of planning a step for groups of these shapes."""
    step = mpmd.jit(step, mpmd.AbstractMpmdMesh(list(shapes)), **options)
    with pytest.raises(mpmd.CompileError) as caught:
        step.lower(weights(2), *batch())
    return caught.value


def test_a_shard_map_for_other_sizes_is_an_error_that_names_the_line():
    step = sgd_step(loss_with_shard_maps(lambda f: f), mpmd.Std1F1B(2))
    message = str(refused(step, SHAPES["fewer rows"], in_specs=(SHARDED, ROWS, ROWS)))
    assert "shard_map at" in message and "test_uneven_groups.py" in message and "(mixed)" in message
    assert "was traced for a mesh of {'data': 4, 'model': 1}, but runs on group 1" in message
    assert "{'data': 2, 'model': 1}: call it in a function under mpmd.per_group" in message


def test_per_group_with_integers_and_without_a_mesh_size():
    """What is not differentiated passes by, and plain JAX runs the function as it is."""

    @mpmd.per_group
    def gathered_rows(table, tokens):
        return table[tokens], {"count": tokens.size + 0 * tokens.sum()}

    def loss(params, x, y):
        rows, counted = gathered_rows(params[0]["w"], jnp.int32(x > 0).sum(-1) % 4)
        h = mpmd.mark_stage_end(layer(params[0], rows) / counted["count"])
        return squares(layer(params[1], h), y)

    step = sgd_step(loss, mpmd.Std1F1B(2))
    shapes = SHAPES["fewer rows"]
    assert_parity(step, weights(2), *batch(), mesh=uneven_mesh_of(*shapes), in_specs=(P(), ROWS, ROWS))


def test_per_group_of_a_function_that_closes_over_a_traced_array():
    def loss(params, x, y):
        return jnp.mean(mpmd.per_group(lambda h: h * params[0]["b"])(x))

    with pytest.raises(TypeError, match="closes over a traced array"):
        jax.jit(jax.grad(loss))(weights(1), jnp.ones((4, 4)), None)


def test_results_under_per_group_whose_shape_depends_on_the_group():
    @mpmd.per_group
    def parts(h):
        return h.reshape(jax.sharding.get_abstract_mesh().shape["data"], -1)

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        return jnp.mean(parts(layer(params[1], h)))

    step = sgd_step(loss, mpmd.Std1F1B(2))
    message = str(refused(step, SHAPES["fewer rows"]))
    assert "returns float32[2, 8] on group 1, whose submesh is {'data': 2" in message
    assert "but float32[4, 4] on group 0" in message


def test_equal_groups_among_others_share_executables():
    shapes = ({"data": 4}, {"data": 2}, {"data": 2})
    loaded = assert_parity(
        sgd_step(lambda p, x, y: jnp.mean(mlp(p, x)), mpmd.GPipe(3)),
        weights(3),
        *batch(),
        mesh=uneven_mesh_of(*shapes),
        in_specs=(P(), ROWS, ROWS),
    )
    ends = {next(r.executable for r in p.runs if r.label == "after_0") for p in loaded.plan.programs}
    assert ends == {"after_0.0", "after_0.1"}


def compile_error(shapes, in_specs, **options):
    return refused(sgd_step(mse, mpmd.Std1F1B(2)), shapes, in_specs=in_specs, **options).faults


def test_specs_are_checked_on_each_group_that_holds_the_leaf():
    shapes = {"data": 2}, {"data": 3}
    faults = compile_error(shapes, (SHARDED, ROWS, ROWS))
    group = "does not divide by 3, the devices along 'data', on group 1, whose submesh is {'data': 3}"
    assert len(faults) == 2
    assert faults[0].startswith("in_shardings: args[0][1]['w'] with shape (4, 4) has the spec P")
    assert f"but dimension 0 of size 4 {group}" in faults[0]
    assert faults[1].startswith("in_shardings: args[2] with shape (4, 4, 4) has the spec P")
    assert f"but dimension 1 of size 4 {group}" in faults[1]
    out_specs = [P(), {"w": P("data"), "b": P()}], None
    (fault,) = compile_error(shapes, P(), out_specs=out_specs)
    assert fault.startswith("out_shardings: result[0][1]['w'] with shape (4, 4)")


def submesh(first, last, *axes):
    return Mesh(np.array(jax.devices()[first:last]).reshape(-1, *[1] * (len(axes) - 1)), axes)


def test_all_that_is_wrong_with_the_meshes_is_said():
    with pytest.raises(ValueError) as caught:
        mpmd.MpmdMesh([submesh(0, 2, "data"), submesh(1, 3, "data"), submesh(3, 5, "data", "model")])
    axes, shared = str(caught.value).splitlines()
    assert axes.startswith("group 2 has the axes ('data', 'model'), but group 0 has ('data',)")
    assert shared.startswith(f"{jax.devices()[1]} is in the meshes of groups 0, 1")
    with pytest.raises(ValueError, match="one for each group"):
        mpmd.MpmdMesh([])
    with pytest.raises(ValueError, match="leave out 'data', or have each mesh with an axis of that name"):
        mpmd.MpmdMesh([submesh(0, 2, "data")], "data")


def test_groups_of_a_list_may_have_the_axis_of_groups():
    even = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    mesh = mpmd.MpmdMesh(even.unstack, "stage")
    assert mesh.abstract_submeshes == even.abstract_submeshes
    assert mesh.mpmd_dim == 2

"""Steps over explicit mesh axes, along which the types of values say how they are sharded."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.explicit import (
    BLOCKS,
    EXPLICIT,
    ROWS,
    Product,
    arguments,
    assert_as_on_one_group,
    assert_two_axes,
    draws,
    grid,
    make_step,
    residual,
)
from tests.support.models import mse, sgd_step, squares
from tests.support.parity import assert_like_jit


@pytest.fixture
def groups():
    with mpmd.MpmdMesh(grid(2, 2), "stage") as mesh:
        yield mesh


@pytest.mark.usual("layers")
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_public_codes_train_as_under_jit(groups, block):
    loaded, (params, (losses, hidden, norm)), expected = assert_as_on_one_group(
        groups, make_step(BLOCKS[block])
    )
    # What types say of results, tasks keep to.
    assert params["layers"][0]["w"].spec == P("fsdp")
    assert hidden.spec == P("fsdp")
    assert losses.spec == norm.spec == params["table"].spec == P()
    assert ("fsdp",) in loaded.plan.executable("fwd_0").out_specs
    # Read in this process, results have the types that they have under plain JAX.
    mine, plain = params["layers"][0]["w"].to_mpmd_local_array, expected[0]["layers"][0]["w"]
    assert jax.typeof(mine) == jax.typeof(plain)


@pytest.mark.usual("product")
@pytest.mark.parametrize("operation", [mpmd.Concat(1), Product()], ids=["rows", "product"])
def test_operations_keep_the_sharding_of_what_they_combine(groups, operation):
    assert_as_on_one_group(groups, make_step(residual, operation=operation))


@pytest.mark.slow
@pytest.mark.parametrize("partial_sums", ["all", "none"])
def test_weights_are_gathered_once_and_sums_stay_in_parts(groups, partial_sums):
    schedule = mpmd.ZeroBubble(2)
    step = make_step(BLOCKS["layers"], schedule)
    assert_as_on_one_group(groups, step, gather="step", partial_sums=partial_sums)


@pytest.mark.slow
def test_an_explicit_axis_beside_an_axis_left_to_xla():
    def loss(params, x, y):
        return mse(params, x, y, residual)

    types = AxisType.Auto, AxisType.Explicit
    args = [{"w": draws(8, 8, seed=i)} for i in (1, 2)], draws(4, 4, 8, seed=3), draws(4, 4, 8, seed=4)
    specs = [{"w": P()}] * 2, ROWS, ROWS
    with mpmd.MpmdMesh(grid(2, 2, types=types), "stage") as mesh:
        step = sgd_step(loss, mpmd.Std1F1B(2))
        assert_as_on_one_group(mesh, step, args, specs, grid(1, 2, types=types))


def test_groups_of_other_sizes():
    """What types say of a value holds on each group, over the axes of its own submesh."""
    devices = np.array(jax.devices())
    meshes = [
        Mesh(devices[:2].reshape(1, 2), ("stage", "fsdp"), axis_types=EXPLICIT),
        Mesh(devices[4:8].reshape(1, 4), ("stage", "fsdp"), axis_types=EXPLICIT),
    ]
    with mpmd.MpmdMesh(meshes) as mesh:
        assert_as_on_one_group(mesh, make_step(residual))


def test_scanned_layers_are_cut_with_their_types(groups):
    """What types said of a stack holds for its parts, in a plan without devices, too."""

    def loss(params, tokens, targets):
        def body(h, w):
            return mpmd.mark_stage_end(residual({"w": w}, h), num_stages=2), None

        h = params["table"].at[tokens].get(out_sharding=P("fsdp", None))
        h, _ = jax.lax.scan(body, h, params["layers"])
        return squares(h, targets)

    step = sgd_step(loss, mpmd.Std1F1B(2))
    (params, *data), (specs, *of_data) = arguments()
    args = {**params, "layers": draws(4, 8, 8, seed=1)}, *data
    specs = {**specs, "layers": P(None, "fsdp")}, *of_data
    loaded, (params, _), expected = assert_as_on_one_group(groups, step, args=args, specs=specs)
    layers = params["layers"]
    assert [part.spec for part in layers.parts] == [layers.spec] * 2 == [P(None, "fsdp")] * 2
    for task in ("fwd_0", "bwd_1"):
        specs_of_task = loaded.compiled.program.plan.executable(task).out_specs
        # JAX gives no type to the indices of a gather alone.
        assert ("fsdp",) in specs_of_task and specs_of_task.count(None) <= 1
    mine, plain = layers.parts[0].to_mpmd_local_array, expected[0]["layers"][:2]
    assert jax.typeof(mine) == jax.typeof(plain)
    planned = mpmd.AbstractMpmdMesh(groups.abstract_submeshes)
    lowered = mpmd.jit(step, planned, in_specs=specs).lower(*args)
    assert lowered.plan.programs == loaded.compiled.program.plan.programs


def test_what_is_sharded_within_the_step_alone(groups):
    """Without specs of arguments."""

    def loss(params, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ params[0]))
        return jnp.sum(jnp.tanh(h @ params[1]) ** 2)

    def step(params, x):
        return sgd_step(loss, mpmd.Std1F1B(2))(params, reshard(x, ROWS))

    args = [draws(8, 8, seed=i) for i in (1, 2)], draws(4, 4, 8, seed=3)
    with jax.set_mesh(grid(1, 2)):
        loaded = assert_like_jit(groups, step, *args)
    assert loaded.plan.executable("fwd_0").out_specs[0] == ("fsdp",)


def test_functions_without_a_loop(groups):
    """A result's type is that of the value that a group holds; so are those of what is passed on."""
    make = mpmd.jit(lambda: reshard(jnp.arange(8.0), P("fsdp")), mpmd_mesh=groups)
    made = make()
    assert made.spec == P("fsdp")

    def doubled(x):
        assert jax.typeof(x).sharding.spec == P("fsdp")
        return x * 2

    again = mpmd.jit(doubled, groups)(made)
    assert again.spec == P("fsdp")
    np.testing.assert_array_equal(again, np.arange(8.0) * 2)


def test_a_sharding_that_jax_refuses_is_refused_with_its_words(groups):
    """A product of two operands that are sharded over one axis, which JAX does not gather by itself."""
    args, specs = arguments()
    with pytest.raises(Exception, match="sharded"):
        mpmd.jit(make_step(lambda p, h: h @ (h.T @ h)), mpmd_mesh=groups, in_specs=specs)(*args)


PARTIAL = P(unreduced={"fsdp"})
REMEDY = r"unreduced=\{'fsdp'\}.*leave them out: groups keep partial sums .* as partial_sums of mpmd.jit says"


@pytest.mark.parametrize("name", ["in_specs", "out_specs"])
def test_specs_of_partial_sums_are_refused(groups, name):
    args, specs = arguments()
    with pytest.raises(mpmd.CompileError, match=REMEDY):
        mpmd.jit(make_step(residual), groups, **{"in_specs": specs, name: PARTIAL}).lower(*args)


def test_shapes_of_partial_sums_are_refused(groups):
    sharding = NamedSharding(grid(1, 2), PARTIAL)
    (params, *data), _ = arguments()
    partial = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding), params)
    with pytest.raises(ValueError, match=REMEDY):
        mpmd.jit(make_step(residual), groups).lower(partial, *data)


def test_partial_sums_behind_the_loop_are_refused_or_right(groups):
    def step(*args):
        params, (losses, *_) = make_step(residual)(*args)
        return jax.tree.map(lambda w: reshard(reshard(w, PARTIAL), P()), params), losses

    with contextlib.suppress(ValueError):
        assert_as_on_one_group(groups, step)


def test_sharded_microbatches_are_gathered(groups):
    """As JaxPP's ``mpmd_reshard.py`` has them."""

    def loss(weights, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jnp.sum((h @ weights[1] - x) ** 2)

    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, mpmd.Std1F1B(2), axis=1)

    args = [draws(8, 4), draws(4, 8, seed=1)], draws(4, 4, 8, seed=2)
    specs = P(), P(None, "fsdp")
    assert_like_jit(groups, step, *args, in_shardings=specs)


def test_meshes_that_cannot_be_those_of_groups():
    with pytest.raises(ValueError, match=r"stage, fsdp are Manual, as within a jax\.shard_map"):
        mpmd.MpmdMesh(grid(2, 2, types=(AxisType.Manual,) * 2), "stage")
    meshes = [
        Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Explicit,)),
        Mesh(np.array(jax.devices()[2:4]), ("fsdp",)),
    ]
    with pytest.raises(
        ValueError, match="group 1 are Auto, but those of group 0 are Explicit; give all the same"
    ):
        mpmd.MpmdMesh(meshes)


@pytest.mark.slow
def test_two_axes():
    with mpmd.MpmdMesh(grid(2, 2, 2), "stage") as mesh:
        loaded = assert_two_axes(mesh)
    assert ("fsdp",) in loaded.plan.executable("fwd_0").out_specs

"""``mpmd.jit`` takes what ``jax.jit`` takes, in the ways in which ``jax.jit`` takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import BATCH, ROW_SPECS, WIDTH, batch, planned, shrink, weights
from tests.support.parity import assert_close, compiles, mesh_of

plain = jax.jit(shrink)


@pytest.fixture
def wide():
    """Groups of two devices each."""
    with mesh_of(2, data=2) as mesh:
        yield mesh


def specs_of(tree):
    return {leaf.spec for leaf in jax.tree.leaves(tree)}


def test_a_decorator_like_jax_jit(mesh):
    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(state, xs, ys):
        """Trains."""
        return shrink(state, xs, ys)

    state = weights(2)
    expected = plain(state, *batch())
    assert step.__name__ == "step" and step.__doc__ == "Trains."
    assert_close(step(state, *batch()), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_methods_are_bound(mesh):
    class Trainer:
        @mpmd.jit(mpmd_mesh=mesh, static_argnums=0)
        def step(self, state, xs, ys):
            return shrink(state, xs, ys, self.rate)

        rate = 0.5

    assert_close(Trainer().step(weights(2), *batch()), plain(weights(2), *batch(), 0.5))


@pytest.mark.parametrize("by_name", [False, True])
def test_donation_by_name(mesh, by_name):
    step = mpmd.jit(shrink, mesh, donate_argnames="state")
    state = weights(2)
    data = dict(zip(("xs", "ys"), batch(), strict=True))
    result = step(state=state, **data) if by_name else step(state, **data)
    assert_close(result, plain(weights(2), *batch()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_names_may_come_from_an_iterator(mesh):
    state = weights(2)
    mpmd.jit(shrink, mesh, donate_argnames=iter(["state"]))(state, *batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("option", ["donate_argnames", "static_argnames"])
def test_names_that_the_step_does_not_have(mesh, option):
    with pytest.raises(ValueError, match=rf"{option} has \['params'\], but the step's arguments are"):
        mpmd.jit(shrink, mesh, **{option: "params"})


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("keep_unused", "never sent"),
        ("device", "those of mpmd_mesh"),
        ("backend", "those of mpmd_mesh"),
        ("inline", "inlined"),
        ("abstracted_axes", "each shape"),
        ("compiler_options", "XLA_FLAGS"),
        ("mesh", "is mpmd_mesh"),
        ("donate_argnms", "unexpected keyword argument 'donate_argnms'"),
    ],
)
def test_other_keywords_say_what_to_use(mesh, keyword, advice):
    with pytest.raises(TypeError, match=advice):
        mpmd.jit(shrink, mesh, **{keyword: None})


def test_specs_are_called_shardings_too(wide):
    step = mpmd.jit(shrink, wide, in_shardings=ROW_SPECS, out_shardings=(P("data"), P()))
    state, total = step(weights(2), *batch())
    assert_close((state, total), plain(weights(2), *batch()))
    assert specs_of(state) == {P("data")}
    with pytest.raises(ValueError, match="in_specs and in_shardings are two names"):
        mpmd.jit(shrink, wide, in_specs=ROW_SPECS, in_shardings=ROW_SPECS)
    with pytest.raises(ValueError, match="out_specs and out_shardings are two names"):
        mpmd.jit(shrink, wide, out_specs=P(), out_shardings=P())


def test_specs_of_arguments_that_are_passed_by_name(wide):
    state, (xs, ys) = weights(2), batch()
    step = mpmd.jit(shrink, wide, in_shardings=(P(),), kwarg_shardings={"ys": P(None, "data")})
    loaded = step.compile(state, ys=ys, xs=xs)
    specs = {leaf.path: leaf.spec for leaf in loaded.plan.inputs}
    assert specs["kwargs['ys']"] == (None, "data") and specs["kwargs['xs']"] == ()
    assert_close(loaded(state, ys=ys, xs=xs), plain(state, xs, ys))
    with pytest.raises(ValueError, match="kwarg_shardings has 'ys', and passed by name are none"):
        step(state, xs, ys)


def placed(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def test_arrays_give_the_sharding_that_they_carry(wide):
    """The whole mesh has the axis of the groups, too; along it, values are where stages need them."""
    state = placed(weights(2), wide.jax_mesh, "data")
    xs, ys = placed(batch(), wide.jax_mesh, None, ("stage", "data"))
    step = mpmd.jit(shrink, wide)
    compiled = step.compile(state, xs, ys)
    assert {leaf.spec for leaf in jax.tree.leaves(compiled.argument_leaves(0))} == {("data",)}
    assert compiled.argument_leaves("xs").spec == (None, "data")
    with compiles() as counted:
        new, total = step(state, xs, ys)
        assert specs_of(new) == {P("data")}
        new, total = step(new, xs, ys)
        jax.block_until_ready(jax.tree.leaves(new))
        assert not counted
    once, _ = plain(weights(2), *batch())
    assert_close((new, total), plain(once, *batch()))


def test_shapes_carry_shardings_too():
    """Which needs no devices."""
    sharding = NamedSharding(jax.sharding.AbstractMesh((2,), ("data",)), P(None, "data"))
    data = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in batch()]
    lowered = planned(shrink, weights(2), *data, axes={"data": 2})
    assert [leaf.spec for leaf in lowered.plan.inputs[-2:]] == [(None, "data")] * 2


def test_given_specs_come_before_carried_ones(wide):
    state = placed(weights(2), wide.jax_mesh, "data")
    step = mpmd.jit(shrink, wide, in_specs=(P(), None, P(None, "data")))
    xs, ys = batch()
    compiled = step.compile(state, placed(xs, wide.jax_mesh, None, "data"), ys)
    leaves = jax.tree.leaves([compiled.argument_leaves(i) for i in range(3)])
    assert [leaf.spec for leaf in leaves] == [()] * 4 + [(None, "data")] * 2


def test_carried_shardings_that_no_group_can_use_are_left_out(wide):
    other = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    state = placed(weights(2), other, "model")
    odd = jnp.ones((3, BATCH + 1, WIDTH))
    leaves = mpmd.jit(shrink, wide).compile(state, odd, odd).argument_leaves(0)
    assert {leaf.spec for leaf in jax.tree.leaves(leaves)} == {()}

"""Copies of arrays from one layout to another."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.compiler.pipeline import compile_step
from mpmd.ir.placement import Placement
from mpmd.ir.routes import bytes_per_step
from mpmd.ir.stack import Stack
from mpmd.step.reshard import LeafCopy, copy_request
from tests.support.effort import costly
from tests.support.parity import assert_close, compiles, uneven_mesh_of
from tests.support.small_plans import stacked_step

LAYERS, WIDTH, ROWS, MICROBATCHES = 12, 4, 2, 2
WEIGHTS = np.arange(LAYERS * WIDTH * WIDTH, dtype=np.float32).reshape(LAYERS, WIDTH, WIDTH) / 1000
BATCH = np.ones((MICROBATCHES, ROWS, WIDTH), np.float32)
GROUPS = 5


@st.composite
def placements(draw):
    """Any cut of the layers into ranges, each on one or two of the groups; or the whole on some."""
    groups = st.lists(st.integers(0, GROUPS - 1), min_size=1, max_size=2, unique=True).map(
        lambda drawn: tuple(sorted(drawn))
    )
    ends = draw(st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=4).map(sorted))
    if not ends:
        return Placement(draw(groups), ())
    sizes = tuple(stop - start for start, stop in itertools.pairwise((0, *ends, LAYERS)))
    return Placement.of_ranges(Stack(0, sizes), tuple(draw(groups) for _ in sizes), ())


def layers_on(placement, group):
    """The numbers of the layers that a group has."""
    whole = (slice(0, LAYERS),)
    slices = placement.stack.slices if placement.stack else whole
    ranges = zip(slices, placement.ranges, strict=True)
    return {layer for layers, held in ranges if group in held.mpmd_idxs for layer in range(LAYERS)[layers]}


@costly
@given(placements(), placements())
def test_each_byte_goes_once_to_each_group_that_lacks_it(held, read):
    aval = jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.float32)
    mesh = mpmd.AbstractMpmdMesh([{"data": 1}] * GROUPS)
    compiled = compile_step(copy_request([LeafCopy(aval, held, read, aval)], mesh.abstract_submeshes))
    lacking = [layers_on(read, group) - layers_on(held, group) for group in range(GROUPS)]
    sent = bytes_per_step(compiled.program.plan, mesh.topology)
    assert sent == sum(map(len, lacking)) * WIDTH * 4


@costly
@given(placements(), placements())
def test_any_cut_of_any_other(held, read):
    array = np.arange(LAYERS * WIDTH).reshape(LAYERS, WIDTH)
    aval = jax.ShapeDtypeStruct(array.shape, array.dtype)
    ranges = held.stack.cut(array) if held.stack else (array,)
    expected = read.stack.cut(array) if read.stack else (array,)
    copied = LeafCopy(aval, held, read, aval).of([*map(jnp.asarray, ranges)])
    assert len(copied) == len(expected)
    assert all(np.array_equal(one, other) for one, other in zip(copied, expected, strict=True))


@pytest.mark.parametrize(("held", "read"), [(0, 1), (1, 0)])
def test_cuts_along_different_axes(held, read):
    array = np.arange(LAYERS * WIDTH).reshape(LAYERS, WIDTH)
    stacks = Stack(0, (7, 5)), Stack(1, (1, 3))
    placements = [Placement.of_ranges(stack, ((0,), (1,)), ()) for stack in stacks]
    aval = jax.ShapeDtypeStruct(array.shape, array.dtype)
    copied = LeafCopy(aval, placements[held], placements[read], aval).of(stacks[held].cut(jnp.asarray(array)))
    assert all(map(np.array_equal, copied, stacks[read].cut(array)))


def step_of(num_stages):
    """A train step of stacked layers, which counts, too."""
    train = stacked_step(num_stages)

    def step(state, xs):
        weights, value = train(state["weights"], xs)
        return {"weights": weights, "count": state["count"] + 1}, value

    return step


STATE = {"weights": WEIGHTS, "count": jnp.int32(0)}


@pytest.fixture(scope="module")
def mesh():
    one, two = {"data": 1, "model": 1}, {"data": 1, "model": 2}
    with uneven_mesh_of(one, one, one, one, two, two, parts={"actor": 4, "sampler": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def actor(mesh):
    return mpmd.jit(step_of(4), mesh.part("actor")).compile(STATE, BATCH)


@pytest.fixture(scope="module")
def sampler(mesh):
    shardings = ({"weights": P(None, None, "model"), "count": P()}, None)
    return mpmd.jit(step_of(2), mesh.part("sampler"), in_shardings=shardings).compile(STATE, BATCH)


same = functools.partial(assert_close, tolerance=0)
"""Asserts equal bits."""


def test_from_four_stages_to_two_sharded_ones_and_back(actor, sampler):
    state, _ = actor(STATE, BATCH)
    copy = mpmd.reshard(state, to=sampler)
    assert [part.mpmd_idxs for part in copy["weights"].parts] == [(4,), (5,)]
    assert copy["weights"].spec == P(None, None, "model")
    same(copy, mpmd.to_host(state))
    _, value = sampler(copy, BATCH)
    _, expected = actor(state, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    same(mpmd.reshard(copy, to=actor), mpmd.to_host(state))
    same(state, mpmd.to_host(copy))  # the originals stay


def test_from_this_process_and_to_it(mesh, actor, sampler):
    same(mpmd.reshard(jax.tree.map(np.asarray, STATE), to=sampler), STATE)
    devices = np.array(jax.devices()[:2])
    sharding = NamedSharding(jax.sharding.Mesh(devices, ("data",)), P())
    spread = jax.device_put(STATE, sharding)
    copy = mpmd.reshard(spread, to=actor)
    same(copy, STATE)
    back = mpmd.reshard(copy, to=sharding)
    same(back, STATE)
    assert all(array.sharding == sharding for array in jax.tree.leaves(back))
    shards = {"weights": NamedSharding(sharding.mesh, P("data")), "count": sharding}
    assert mpmd.reshard(copy, to=shards)["weights"].sharding == shards["weights"]


def test_to_all_groups_of_a_part_in_another_dtype(mesh, actor):
    state, _ = actor(STATE, BATCH)
    copy = mpmd.reshard(state, to=mesh.part("sampler"), dtype=jnp.bfloat16)
    assert {array.mpmd_idxs for array in jax.tree.leaves(copy)} == {(4, 5)}
    same(copy, {"weights": np.asarray(state["weights"]).astype(jnp.bfloat16), "count": np.int32(1)})


def test_typed_keys(mesh):
    keys = {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(2), 3)}
    copy = mpmd.reshard(mpmd.reshard(keys, to=mesh.part("actor")), to=mesh.part("sampler"))
    assert_close(copy, keys, 0)


@jax.tree_util.register_pytree_node_class
class ArraysAlone:
    """Refuses leaves of which JAX knows no shape, as jmp's loss scales do."""

    def __init__(self, value):
        self.value = value
        jax.eval_shape(lambda: value)

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_pytree_that_refuses_what_is_no_array(mesh):
    def step(state, xs):
        loss, grads = mpmd.treduce(
            jax.value_and_grad(lambda x: jnp.sum(x * state.value)),
            mpmd.microbatches(xs, 2),
            schedule=mpmd.Std1F1B(1),
            operation=mpmd.Add,
        )
        return ArraysAlone(state.value + grads.sum()), loss

    state, xs = ArraysAlone(jnp.float32(2)), jnp.ones((4, 3))
    loaded = mpmd.jit(step, mesh.part("sampler")).compile(state, xs)
    leaf = loaded.argument_leaves().value
    assert (leaf.shape, leaf.dtype, leaf.path) == ((), np.float32, "args[0][<flat index 0>]")
    assert leaf.path in str(leaf) and leaf != leaf.aval
    for copy in (mpmd.reshard(state, to=loaded), loaded.init(lambda: ArraysAlone(jnp.float32(2)))):
        assert float(copy.value) == 2 and copy.value.mpmd_idxs == leaf.mpmd_idxs
    with pytest.raises(TypeError, match=r"an argument is ArgumentLeaf.*has no value: pass an array"):
        loaded(loaded.argument_leaves(), xs)


def test_an_argument_by_its_name(actor, sampler):
    batch = mpmd.reshard(BATCH, to=sampler, argnum="xs")
    assert batch.mpmd_idxs == (4,)
    same(batch, BATCH)


def test_to_a_function_that_was_compiled_once(mesh):
    function = mpmd.jit(step_of(2), mesh.part("sampler"))
    with pytest.raises(ValueError, match="the function step was compiled for no arguments yet"):
        mpmd.reshard(STATE, to=function)
    function.compile(STATE, BATCH)
    same(mpmd.reshard(STATE, to=function), STATE)


def test_doubles_stay_doubles(mesh):
    actor, sampler = (mesh.part(name) for name in ("actor", "sampler"))
    with jax.enable_x64(True):
        held = mpmd.reshard(np.array([1 / 3]), to=actor)
    assert mpmd.to_host(mpmd.reshard(held, to=sampler)).tolist() == [1 / 3]


def test_copies_of_the_same_layout_are_compiled_once(actor, sampler):
    state, _ = actor(STATE, BATCH)
    mpmd.reshard(state, to=sampler)
    state, _ = actor(state, BATCH)
    with compiles() as counted:
        same(mpmd.reshard(state, to=sampler), mpmd.to_host(state))
    assert not counted


def test_a_copy_of_what_was_lost_says_why(mesh, sampler):
    def fails(state, xs):
        def lost(x):
            raise ValueError("no more")

        return {
            "weights": jax.pure_callback(lost, state["weights"], state["weights"]),
            "count": state["count"],
        }

    state = mpmd.jit(fails, mesh.part("actor"))(mpmd.reshard(STATE, to=mesh.part("actor")), BATCH)
    with pytest.raises(RuntimeError, match="no more"):
        np.asarray(mpmd.reshard(state, to=sampler)["weights"])
    same(mpmd.reshard(STATE, to=sampler), STATE)  # and the groups go on


@pytest.mark.parametrize(
    ("tree", "options", "error", "message"),
    [
        ({**STATE, "weights": WEIGHTS[1:]}, {}, ValueError, r"tree\['weights'\] is of shape \[11, 4, 4\]"),
        (
            {"weights": WEIGHTS.astype(jnp.bfloat16), "more": BATCH},
            {},
            ValueError,
            r"(?s)the step reads tree\['count'\], which the tree lacks.*has tree\['more'\].*"
            r"tree\['weights'\] is bfloat16, and args\[0\]\['weights'\] is float32: dtype=jnp.float32",
        ),
        ({"weights": "w"}, {}, TypeError, r"tree\['weights'\] is a str, not an array"),
        (STATE, {"argnum": 7}, ValueError, "there is no argument argnum=7"),
        (STATE, {"dtype": "float33"}, TypeError, "dtype must be a floating-point dtype, .* not 'float33'"),
        (STATE, {"dtype": jnp.int32}, TypeError, "dtype must be a floating-point dtype"),
    ],
)
def test_bad_copies(sampler, tree, options, error, message):
    with pytest.raises(error, match=message):
        mpmd.reshard(tree, **{"to": sampler, **options})


def test_a_copy_to_a_part_after_its_mesh_was_closed_and_is_used_again():
    with uneven_mesh_of({"data": 1}, {"data": 1}, parts={"one": 1, "other": 1}) as mesh:
        part = mesh.part("other")
        gone = mpmd.reshard(BATCH, to=part)
        mesh.close()
        same(mpmd.reshard(BATCH, to=part), BATCH)
        with pytest.raises(ValueError, match="tree is on another mesh, or on this one before it was closed"):
            mpmd.reshard(gone, to=part)

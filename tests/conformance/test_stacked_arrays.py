"""Arrays in parts are one array to the caller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpmd
from tests.support.models import batch, sgd_step
from tests.support.parity import assert_close, assert_stays, compiles, mesh_of
from tests.support.small_plans import stacked_step
from tests.support.stacked_state import compiled, initial_state, step_of


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(3) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    return compiled(mesh, mpmd.Std1F1B(3), every=(1, 4, 2))


def test_it_says_which_layers_are_where_and_is_read_as_one(step):
    state = step.init(initial_state)
    w, scale = state[0]["layers"]["w"], state[0]["layers"]["scale"]
    assert repr(w) == (
        "MpmdArray(shape=(7, 4, 4), dtype=float32, [0:1] on (0,), [1:5] on (1,), [5:7] on (2,), spec=P())"
    )
    assert "[:, 1:5] on (1,)" in repr(scale) and scale.dtype == jnp.bfloat16
    assert w.mpmd_idxs == (0, 1, 2) and w.stack.sizes == (1, 4, 2) and w.parts[1].shape == (4, 4, 4)
    expected = jax.jit(initial_state)()
    assert_close(state, expected, tolerance=0)
    np.testing.assert_array_equal(
        jax.random.key_data(jnp.asarray(state[2])), jax.random.key_data(expected[2])
    )
    assert [array.shape for array in w.to_mpmd_local_array] == [(1, 4, 4), (4, 4, 4), (2, 4, 4)]
    with pytest.raises(TypeError, match="read the copies of each of its parts"):
        w.copies  # noqa: B018


def test_it_is_donated_and_deleted_as_one(step):
    state = step.init(initial_state)
    new, _ = step(state, *batch())
    old = state[0]["layers"]["w"]
    assert old.is_deleted() and all(part.is_deleted() for part in old.parts) and "deleted" in repr(old)
    with pytest.raises(ValueError, match=r"^args\[0\] was deleted or donated"):
        step(state, *batch())
    with pytest.raises(RuntimeError, match=r"shape=\(7, 4, 4\).* was donated to a step or deleted"):
        np.asarray(old)
    new[0]["layers"]["w"].delete()
    assert new[0]["layers"]["w"].parts[0].is_deleted()


def test_the_host_and_other_parts_feed_it(mesh, step):
    losses = []
    other = compiled(mesh, mpmd.GPipe(3), num_stages=3)
    for state in (initial_state(), other.init(initial_state), step.init(initial_state)):
        state, loss = step(state, *batch())
        assert_stays(state, step.plan)
        losses.append(float(loss))
    assert losses[0] == losses[1] == losses[2]


def test_a_part_of_an_array_that_the_caller_keeps_travels_once(mesh):
    weights, xs = jax.random.normal(jax.random.key(0), (6, 4, 4)), np.asarray(batch()[0])
    compiled = mpmd.jit(stacked_step(3), mesh).compile(weights, xs)
    sent = []
    submit = mesh.runtime.ask

    def watched(requests):
        sent.append(sum(len(request.host_arrays) for request in requests.values()))
        return submit(requests)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mesh.runtime, "ask", watched)
        results = [compiled(weights, xs) for _ in range(2)]
    assert sent[0] - sent[1] == 3
    assert_close(results[1], jax.jit(stacked_step(3))(weights, xs))


@pytest.mark.slow
def test_a_step_of_it_is_checked_against_plain_jax(mesh, step):
    found = mpmd.check(step, step_of(mpmd.Std1F1B(3), every=(1, 4, 2)), initial_state(), *batch(), steps=2)
    assert found.ok, found
    change = {leaf.path: leaf.change for leaf in found.leaves}
    assert change["result[0][0]['layers']['w']"] < 0.1, "the weights that were there before are compared with"


def test_functions_without_a_loop_keep_parts(mesh, step):
    params = step.init(initial_state)[0]
    average = mpmd.jit(lambda a, b: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, a, b), mesh)(params, params)
    assert average["layers"]["w"].placement == params["layers"]["w"].placement

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(jnp.float32(x) ** 2) for x in jax.tree.leaves(tree)))

    assert_close(mpmd.jit(norm, mesh)(params), jax.jit(norm)(mpmd.to_host(params)))


@pytest.mark.usual("replicated")
@pytest.mark.parametrize(("every", "spec"), [((2, 4), ("x",)), ((3, 3), ())], ids=["sharded", "replicated"])
def test_an_array_that_is_sharded_over_layers_is_so_where_its_parts_divide(every, spec):
    """It is replicated where they do not. What the user asks for is refused instead."""

    def loss(w, x):
        def body(h, w):
            return mpmd.mark_stage_end(jnp.tanh(h @ w), every=every), None

        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    step = sgd_step(loss, mpmd.Std1F1B(2))
    w, xs = jax.random.normal(jax.random.key(0), (6, 4, 4)), batch()[0]
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = jax.device_put(w, NamedSharding(devices, PartitionSpec("x")))
    with mesh_of(2, x=2) as mesh:
        function = mpmd.jit(step, mesh)
        assert [leaf.spec for leaf in function.compile(sharded, xs).plan.inputs] == [spec, spec, ()]
        new, total = function(sharded, xs)
        assert_close((new, total), jax.jit(step)(w, xs))
        with compiles() as counted:
            function(new, xs)[0].block_until_ready()
        assert not counted, "the second step compiled again"
        asked = mpmd.jit(step, mesh, in_specs=(PartitionSpec("x"), PartitionSpec()))
        if not spec:
            with pytest.raises(mpmd.CompileError, match="it counts layers, so shard another one"):
                asked(w, xs)

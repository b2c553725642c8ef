"""Functions without a loop: what ``jax.jit`` computes, where the arguments are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_close, assert_replicas_equal, compiles, mesh_of, raw, uneven_mesh_of
from tests.support.plans import sent_values
from tests.support.tied import GROUPS, batch_shapes, init_fn, logits, state_shapes, tokens, train_step


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(GROUPS, data=2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def held(mesh):
    """The state of a step on the groups that train it, sharded; the embedding is on two groups."""
    specs = jax.tree.map(lambda leaf: P(None, "data") if len(leaf.shape) == 2 else P(), state_shapes())
    step = mpmd.jit(train_step, mesh, in_specs=(specs, P(), P())).compile(state_shapes(), *batch_shapes())
    return step.init(init_fn, jax.random.key(0))


def average(average, params, decay):
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, average, params)


def norm(params):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)))


def skipped(params):
    return jax.lax.cond(norm(params) > 1e6, lambda: params, lambda: jax.tree.map(jnp.negative, params))


def noisy(params, key):
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noise = [leaf + jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noise), key


STAYS = {
    "average": lambda s: (average, (s["params"], s["params"], 0.9)),
    "cast": lambda s: (functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16)), (s["params"],)),
    "conditional": lambda s: (skipped, (s["params"],)),
    "identity": lambda s: (lambda params: params, (s["params"],)),
}
"""Functions of the state, and their arguments, whose results are where their arguments are."""

COMPUTES = {
    "metrics": lambda s: (
        lambda state: {
            "norms": jax.tree.map(jnp.linalg.norm, state["params"]),
            "largest": jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, state["params"])),
            "count": sum(x.size for x in jax.tree.leaves(state)),
        },
        (s,),
    ),
    "typed key": lambda s: (noisy, (s["params"], jax.random.key(1))),
    "exchange": lambda s: (lambda a, b: (b, a), (s["params"]["layers"][0], s["params"]["layers"][1])),
    "no arguments": lambda s: (lambda: {"eye": jnp.eye(3), "one": 1}, ()),
    "host arguments alone": lambda s: (lambda a, b: (a @ b, b), (np.ones((3, 4), "f"), jnp.ones((4, 2)))),
    "gather": lambda s: (lambda params, tokens: params["embedding"][tokens], (s["params"], np.arange(5))),
}


def assert_same(fun, args, mesh, **options):
    """Calls the function on the mesh and under ``jax.jit``; returns the result and the compiled function.

    Asserts that no argument passes through the driver, and that the next call would not compile.
    """
    expected = jax.jit(fun)(*mpmd.to_host(args))
    jitted = mpmd.jit(fun, mesh, **options)

    def fetch(self):
        raise AssertionError(f"{self} is fetched")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mpmd.MpmdArray, "raw_value", fetch)
        loaded = jitted.compile(*args)
        result = jitted(*args)
    assert_close(result, expected)
    assert_replicas_equal(result)
    assert jitted.compile(*args) is loaded, "the next call would compile again"
    return result, loaded


@pytest.mark.parametrize("case", STAYS.values(), ids=STAYS)
def test_results_are_where_the_arguments_are(mesh, held, case):
    fun, args = case(held)
    result, _ = assert_same(fun, args, mesh)
    for leaf, argument in zip(jax.tree.leaves(result), jax.tree.leaves(held["params"]), strict=True):
        assert leaf.placement == argument.placement


@pytest.mark.parametrize("case", COMPUTES.values(), ids=COMPUTES)
def test_computes_what_jit_computes(mesh, held, case):
    fun, args = case(held)
    assert_same(fun, args, mesh)


def test_only_scalars_are_sent_for_a_norm_and_one_copy_of_a_shared_average(mesh, held):
    _, loaded = assert_same(norm, (held["params"],), mesh)
    assert {aval.shape for aval in sent_values(loaded.plan)} == {()}
    untied = held["params"]["layers"]
    _, loaded = assert_same(average, (untied, untied, 0.9), mesh)
    assert not sent_values(loaded.plan)
    tied = held["params"]["embedding"]
    _, loaded = assert_same(average, (tied, tied, 0.9), mesh)
    assert [aval.shape for aval in sent_values(loaded.plan)] == [tied.shape]


def test_arrays_elsewhere_compile_anew_and_move_as_little_as_they_can(mesh, held):
    first, second, third = held["params"]["layers"]
    multiply = mpmd.jit(lambda a, b: a["w"] * b["w"], mesh)
    assert multiply(first, first).mpmd_idxs == (0,)
    assert multiply(third, third).mpmd_idxs == (2,)
    assert multiply.compile(first, first) is not multiply.compile(third, third)
    assert not sent_values(multiply.compile(second, second).plan)
    assert len(sent_values(multiply.compile(first, second).plan)) == 1
    with compiles() as counted:
        jax.block_until_ready(multiply(first, first))
    assert not counted
    expected = np.asarray(first["w"]) * np.asarray(third["w"])
    assert_close(multiply(first, third), expected)
    assert_close(multiply.compile(first, first)(first, third), expected)


def test_the_larger_argument_stays(mesh, held):
    bias, weight = held["params"]["layers"][0]["b"], held["params"]["layers"][1]["w"]
    result, loaded = assert_same(lambda a, b: a + b, (bias, weight), mesh)
    assert result.mpmd_idxs == (1,)
    assert all(aval.nbytes <= bias.nbytes for aval in sent_values(loaded.plan))


def test_donated_arrays_are_taken_over(mesh, held):
    copies = mpmd.jit(lambda params: jax.tree.map(lambda x: x * 1, params), mesh)(held["params"])
    step = mpmd.jit(average, mesh, donate_argnums=0)
    loaded = step.compile(copies, held["params"], 0.5)
    assert any(executable.donated for executable in loaded.plan.executables)
    assert_close(step(copies, held["params"], 0.5), mpmd.to_host(held["params"]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies))
    with pytest.raises(ValueError, match=r"^args\[0\] was deleted or donated"):
        step(copies, held["params"], 0.5)


def test_a_donated_array_may_be_sent(mesh, held):
    first, second = (mpmd.jit(jnp.copy, mesh)(held["params"]["layers"][group]["w"]) for group in (0, 1))
    expected = np.asarray(first) @ np.asarray(second)
    step = mpmd.jit(jnp.matmul, mesh, donate_argnums=(0, 1))
    assert sent_values(step.compile(first, second).plan)
    assert_close(step(first, second), expected)
    assert first.is_deleted() and second.is_deleted()


@pytest.mark.parametrize("specs", [None, (P("data"),)], ids=["as held", "given"])
def test_shardings(mesh, held, specs):
    weight = held["params"]["layers"][1]["w"]
    result, loaded = assert_same(lambda w: w + 1, (weight,), mesh, in_specs=specs)
    assert loaded.plan.inputs[0].spec == result.placement.spec == (("data",) if specs else (None, "data"))
    result, _ = assert_same(lambda w: w + 1, (weight,), mesh, out_specs=P("data"))
    assert result.spec == P("data")


def test_groups_that_are_not_alike():
    """A dimension of 4 does not divide over 8 devices, so that group holds it replicated."""
    with uneven_mesh_of({"data": 2}, {"data": 4}) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh, in_specs=(P("data"), P(), P()))
        (params, _), _ = step(init(weights(2)), *batch())
        result, _ = assert_same(average, (params, params, 0.5), mesh)
        assert [leaf.mpmd_idxs for leaf in jax.tree.leaves(result)] == [(0,), (0,), (1,), (1,)]
        product, _ = assert_same(lambda p: p[0]["w"] @ p[1]["w"], (params,), mesh)
        assert product.mpmd_idxs == (0,)


def test_marks_are_the_identity_and_a_warning_says_that_there_are_no_stages(mesh, held):
    call = mpmd.jit(logits, mesh)
    with pytest.warns(
        mpmd.PerformanceWarning, match=r"mark_stage_end at \S*tied.py:\d+ .* outside of any treduce"
    ):
        result = call(held["params"], tokens()[0][0])
    with jax.default_matmul_precision("highest"):
        assert_close(result, jax.jit(logits)(mpmd.to_host(held["params"]), tokens()[0][0]))


def test_arrays_of_another_mesh_are_refused(mesh, held):
    with mesh_of(GROUPS, data=2) as other:
        jitted = mpmd.jit(norm, other)
        for call in (jitted, jitted.compile(held["params"])):
            with pytest.raises(
                ValueError, match=r"args\[0\]\['embedding'\], args\[0\].*: held by the groups of another mesh"
            ):
                call(held["params"])
        theirs = jitted(mpmd.to_host(held["params"]))
    with pytest.raises(
        ValueError, match=r"args\[0\]: held by the groups of another mesh, or of this one before"
    ):
        mpmd.jit(jnp.sin, mesh)(theirs)


def test_what_is_told_of_a_function(mesh, held):
    _, product = assert_same(lambda p: p[0]["w"] @ p[1]["w"], (held["params"]["layers"],), mesh)
    explanation = mpmd.explain(product)
    assert "stays where it is, and is sent" in str(explanation.leaf("args[0][1]['w']"))
    assert "is where it is read" in str(explanation.leaf("args[0][0]['w']"))
    assert "an argument" in str(explanation)
    assert [(edge.src, edge.dst) for edge in explanation.edges] == [(1, 0)]
    assert [group.tasks for group in product.report().groups] == [1, 0, 0]
    assert "without a loop" in str(product.compiled.step)
    _, events = product.profile(held["params"]["layers"])
    assert {event.label for event in events if event.mpmd_idx == 0} >= {"after_0"}
    _, shared = assert_same(lambda x: x.astype(jnp.bfloat16), (held["params"]["embedding"],), mesh)
    assert "is sent to group 2\n" in f"{mpmd.explain(shared).leaf('result')}\n"


def test_the_same_bits_in_all_replicas_of_a_result(mesh, held):
    """What rounds is computed once; a counter, which several groups hold, by each."""
    counter = held["optimizer"][0].count
    assert len(counter.mpmd_idxs) == GROUPS
    result, loaded = assert_same(lambda count: count + 1, (counter,), mesh)
    assert result.mpmd_idxs == counter.mpmd_idxs and not sent_values(loaded.plan)
    temperature = held["params"]["temperature"]
    result, loaded = assert_same(jnp.sin, (temperature,), mesh)
    assert result.mpmd_idxs == temperature.mpmd_idxs
    assert len(sent_values(loaded.plan)) == GROUPS - 1
    assert {raw(leaf).tobytes() for leaf in result.to_mpmd_local_array} == {raw(result).tobytes()}

"""Lowered and compiled steps have the attributes of ``jax.stages``, and functions those of ``jax.jit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import descend, planned
from tests.support.parity import mesh_of
from tests.support.small_plans import stacked_step

WEIGHTS = [np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32) / 2]
X = np.ones((4, 8), np.float32)


def train_step(weights, x, *, power, num_microbatches=1):
    """With one microbatch JAX counts as we do: it counts the body of a loop once."""

    def loss(w, x):
        return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** power)

    options = {"num_microbatches": num_microbatches, "schedule": mpmd.Std1F1B(2)}
    loss_value, grads = mpmd.value_and_grad(loss, **options)(weights, x)
    return descend(weights, grads), loss_value


OPTIONS = {"static_argnames": "power", "donate_argnums": 0}


@pytest.fixture(scope="module")
def step():
    with mesh_of(2) as mesh:
        yield mpmd.jit(train_step, mesh, **OPTIONS)


@pytest.fixture(scope="module")
def lowered(step):
    return step.lower(WEIGHTS, X, power=2)


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


@pytest.fixture(scope="module")
def plain():
    return jax.jit(train_step, **OPTIONS)


@pytest.mark.parametrize("stage", ["lowered", "compiled"])
@pytest.mark.parametrize(
    "name", ["args_info", "in_tree", "in_avals", "donate_argnums", "out_info", "out_tree"]
)
def test_arguments_and_results_are_those_of_jax(request, plain, stage, name):
    ours = getattr(request.getfixturevalue(stage), name)
    assert ours == getattr(plain.lower(WEIGHTS, X, power=2), name)


@pytest.mark.parametrize("stage", ["lowered", "compiled"])
def test_costs_are_those_of_all_tasks(request, plain, stage):
    costs = request.getfixturevalue(stage).cost_analysis()
    theirs = plain.lower(WEIGHTS, X, power=2).cost_analysis()
    products = 5 * 2 * 4 * 8 * 8  # two forwards, two gradients of weights, one of the activation
    for each in (costs, theirs):
        assert products < each["flops"] < 1.4 * products
    assert costs["transcendentals"] == theirs["transcendentals"] == 4 * 8
    assert costs["bytes accessed"] > 0
    assert not [key for key in costs if key.endswith("}")]


def test_an_executable_counts_as_often_as_it_runs():
    def flops(num_microbatches):
        step = functools.partial(train_step, power=2, num_microbatches=num_microbatches)
        return planned(step, WEIGHTS, jnp.ones((4 * num_microbatches, 8))).cost_analysis()["flops"]

    assert flops(4) == pytest.approx(4 * flops(1), rel=0.1)


def test_memory_is_that_of_the_largest_group(compiled):
    stats = compiled.memory_analysis()
    largest = max(compiled.report().groups, key=lambda group: group.peak_bytes)
    assert stats.peak_memory_in_bytes == largest.peak_bytes
    weight = 8 * 8 * 4
    assert stats.alias_size_in_bytes == weight
    assert stats.argument_size_in_bytes >= weight + X.nbytes * (largest.mpmd_idx == 0)
    assert stats.output_size_in_bytes in (weight, weight + 4)
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert total - stats.alias_size_in_bytes == largest.peak_bytes
    theirs = jax.jit(jnp.sum).lower(X).compile().memory_analysis()
    names = [name for name in dir(theirs) if name.endswith("_in_bytes")]
    assert [name for name in names if not hasattr(stats, name)] == []


def test_texts_are_those_of_all_executables(lowered, compiled):
    count = len(lowered.plan.executables)
    assert lowered.as_text().count("module @") == lowered.as_text("hlo").count("HloModule") == count
    assert "loc(" in lowered.as_text(debug_info=True)
    assert compiled.as_text().count("HloModule") == count


def test_shardings_are_over_the_shape_of_a_group():
    step = functools.partial(train_step, power=2)
    lowered = planned(step, WEIGHTS, X, axes={"data": 2}, in_shardings=(P(), P("data")))
    (weights, x), _ = lowered.input_shardings
    assert [sharding.spec for sharding in weights] == [P(), P()]
    assert x.spec == P("data")
    assert x.mesh.shape == {"stage": 1, "data": 2}
    new_weights, loss = lowered.output_shardings
    assert [sharding.spec for sharding in (*new_weights, loss)] == [P(), P(), P()]


def test_shardings_of_stacked_layers():
    lowered = planned(stacked_step(2), jnp.stack(WEIGHTS), X[None])
    assert jax.tree.structure(lowered.input_shardings) == lowered.in_tree
    assert lowered.output_shardings[0].spec == P()


@pytest.mark.parametrize(
    ("stage", "name"),
    [("lowered", "compiler_ir"), ("compiled", "runtime_executable"), ("compiled", "input_formats")],
)
def test_what_a_step_lacks_names_what_it_has(request, stage, name):
    with pytest.raises(AttributeError, match=rf"{name!r}; step.report\(\), step.plan and mpmd.explain"):
        getattr(request.getfixturevalue(stage), name)


def test_traces_and_shapes_are_those_of_jax(step, plain):
    assert isinstance(step, jax.stages.Wrapped)
    traced, theirs = (f.trace(WEIGHTS, X, power=2) for f in (step, plain))
    assert str(traced.jaxpr) == str(theirs.jaxpr)
    for name in ("args_info", "in_tree", "in_avals", "out_info", "out_tree", "fun_name", "donate_argnums"):
        assert getattr(traced, name) == getattr(theirs, name)
    assert traced.lower().plan == step.lower(WEIGHTS, X, power=2).plan
    with_power = functools.partial(step, power=2)
    shapes = plain.eval_shape(WEIGHTS, X, power=2)
    assert step.eval_shape(WEIGHTS, X, power=2) == shapes
    assert jax.tree.map(jnp.shape, jax.eval_shape(with_power, WEIGHTS, X)) == jax.tree.map(jnp.shape, shapes)
    closed, of_jaxpr = jax.make_jaxpr(with_power, return_shape=True)(WEIGHTS, X)
    assert jax.tree.map(jnp.shape, of_jaxpr) == jax.tree.map(jnp.shape, shapes)
    assert closed.eqns[-1].primitive.name == "mpmd_step"


def test_arguments_named_by_position_are_passed_by_name(mesh):
    def power_of(x, power):
        return x * power if power > 2 else x

    options = {"static_argnums": 1, "donate_argnums": 0}
    step, plain = mpmd.jit(power_of, mesh, **options), jax.jit(power_of, **options)
    assert step.eval_shape(X, power=3) == plain.eval_shape(X, power=3)
    assert step.trace(x=X, power=3).args_info == plain.trace(x=X, power=3).args_info


def test_a_function_used_again_after_its_mesh_was_closed_has_one_plan():
    with mesh_of(2) as mesh:
        step = mpmd.jit(lambda x: x + 1, mesh)
        before = step(X)
        mesh.close()
        assert step(X).shape == before.shape
        assert step.plan


def test_a_step_without_tasks_can_be_profiled(mesh):
    step = mpmd.jit(lambda x: x, mesh).compile(X)
    assert "driver" in str(step.profile(X))
    assert str(step.report())


def test_forgotten_steps_are_compiled_again(mesh, plain):
    step = mpmd.jit(lambda x: x + 1, mesh)
    for _ in range(2):
        step(X)
        assert step._cache_size() == 1
    step.clear_cache()
    assert step._cache_size() == 0
    assert np.array_equal(step(X), X + 1)

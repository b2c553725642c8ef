"""Weights that are sharded over the batch's axes: how often they are gathered, and which are.

Counted in the programs that XLA compiled, for steps whose results are those of plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.plan import Free, OutsideTask
from tests.support.collectives import bytes_by_operation
from tests.support.models import descend, init, planned
from tests.support.parity import assert_parity, mesh_of, uneven_mesh_of
from tests.support.sharded_batches import (
    BATCH,
    BIAS,
    FSDP,
    MANY_ROWS,
    ONE_F_ONE_B,
    STACKED,
    WEIGHT,
    D,
    mean,
    mlp,
    mlp_weights,
    normal,
    on_second_stage,
    run,
    scanned,
    train,
    w,
    with_first,
)

ONCE = {"partial_sums": "all", "gather": "step"}


def sharded(params):
    """The specs of parameters, along their last dimension."""
    return jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "data"), params)


def nbytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def gathered(loaded):
    """For each group, the types and specs of what its tasks before the loop make and others only read."""
    plan = loaded.plan
    found = []
    for program in plan.programs:
        freed = {name for i in program.instructions if isinstance(i, Free) for name in i.values}
        made = set()
        for before in program.runs:
            if isinstance(before.task, OutsideTask) and before.task.side == "before":
                e = plan.executable(before.executable)
                outputs = zip(before.outputs, e.outputs, e.out_specs, strict=True)
                made |= {(str(aval), spec) for name, aval, spec in outputs if name in freed}
        found.append(made)
    return found


@pytest.fixture(scope="module")
def once():
    """A step that gathers each weight once, and its collectives in microbatches and outside."""
    return run(train(mlp), mlp_weights(), MANY_ROWS, in_specs=FSDP, **ONCE)


def test_a_step_has_one_gather_and_one_reduction_for_each_weight(once):
    loaded, in_loop, outside = once
    assert bytes_by_operation(in_loop) == {}
    assert bytes_by_operation(outside) == {"all-gather": 2 * WEIGHT, "all-reduce": 2 * (WEIGHT + BIAS) + 4}
    weights = [c.operation for found in outside.values() for c in found if (D, D) in c.shapes]
    assert sorted(weights) == ["all-gather"] * 2 + ["all-reduce"] * 2
    assert gathered(loaded) == [{("float32[8,8]", ())}] * 2


def cast_in_the_loop(params, x):
    return mean(x @ params["w"].astype(jnp.bfloat16).astype(jnp.float32).T)


IN_WHOLE = {
    "checkpointed scan": (functools.partial(scanned, wrap=jax.checkpoint), STACKED),
    "cast in the loop": (cast_in_the_loop, {"w": w}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "params"), IN_WHOLE.values(), ids=IN_WHOLE)
def test_all_weights_of_a_stage_are_gathered_once(loss, params):
    specs = ({"first": P(), "second": sharded(params)}, BATCH)
    step = train(on_second_stage(loss))
    _, in_loop, outside = run(step, with_first(params), MANY_ROWS, in_specs=specs, **ONCE)
    assert bytes_by_operation(in_loop) == {}
    assert bytes_by_operation(outside)["all-gather"] == nbytes(params)


def outside_the_loop(prepare, loss):
    """A step whose loop reads what ``prepare`` makes of the weights before it."""

    def step(params, xs):
        made = [p | {"w": prepare(p["w"])} for p in params]
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(made, x), xs, ONE_F_ONE_B, operation=mpmd.Add
        )
        grads = jax.tree.map(lambda p, g: (g.T if g.ndim == 2 else g).astype(p.dtype), params, grads)
        return descend(params, grads), value

    return step


@pytest.mark.slow
def test_what_is_made_of_weights_before_the_loop_is_gathered():
    """In the dtype that it has by then, and without an axis that XLA is free to choose."""
    step = outside_the_loop(lambda weight: weight.T.astype(jnp.bfloat16), mlp)
    loaded, in_loop, outside = run(step, mlp_weights(), MANY_ROWS, in_specs=FSDP, tolerance=2e-2, **ONCE)
    assert "all-gather" not in bytes_by_operation(in_loop)
    assert "all-gather" in bytes_by_operation(outside)
    assert gathered(loaded) == [{("bfloat16[8,8]", ())}] * 2


def test_another_axis_of_a_weight_stays():
    def loss(params, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ params["first"]))
        return mean(jnp.tanh(h @ params["up"]) @ params["down"])

    params = {"first": w, "up": normal(3, D, 16), "down": normal(4, 16, D)}
    specs = {"first": P("data"), "up": P("data", "model"), "down": P(("model", "data"))}
    axes = {"data": 2, "model": 2}
    loaded, in_loop, _ = run(train(loss), params, MANY_ROWS, axes=axes, in_specs=(specs, BATCH), **ONCE)
    first, second = gathered(loaded)
    assert first == {("float32[8,8]", ())}
    assert second == {("float32[8,16]", (None, "model")), ("float32[16,8]", ("model",))}
    assert "all-gather" not in bytes_by_operation(in_loop)


@pytest.mark.slow
def test_values_with_the_batch_of_a_microbatch_are_not_gathered():
    """Rows that are normalised in the loop, and a key of the microbatch beside a weight."""

    def step(state, xs):
        params, center, key = state

        def loss(params, i):
            x = ((xs - center) * 2)[i]
            k = jax.random.fold_in(key, i)
            h = mpmd.mark_stage_end(jax.checkpoint(dropped)(params[0], k, x))
            return mean(h @ params[1]["w"])

        def dropped(p, k, h):
            return jnp.tanh(h @ p["w"]) * jax.random.bernoulli(k, 0.5, h.shape)

        value, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(params, i), len(xs), ONE_F_ONE_B, operation=mpmd.Add
        )
        return (descend(params, grads), center, key), value

    state = (mlp_weights(), jnp.ones((64, D)), jax.random.key(0))
    specs = ((FSDP[0], P("data"), P()), BATCH)
    loaded, in_loop, _ = run(step, state, MANY_ROWS, in_specs=specs, **ONCE)
    assert gathered(loaded) == [{("float32[8,8]", ())}] * 2
    assert bytes_by_operation(in_loop) == {}


def test_what_a_loop_reads_beside_a_number_of_the_microbatch_is_gathered():
    """The number, too, is read by the microbatch index, and the weight is not."""

    def loss(params, microbatch):
        x, repetitions = microbatch
        weight = lax.stop_gradient(params["w"])
        total = lax.fori_loop(0, repetitions, lambda _, total: total + jnp.sum(weight), 0.0)
        return mean(mpmd.mark_stage_end(x) @ params["w"]) + total

    batch = MANY_ROWS, jnp.arange(len(MANY_ROWS))
    specs = {"w": P(None, "data")}, (BATCH, P())
    loaded, in_loop, _ = run(train(loss), {"w": w}, batch, in_specs=specs, **ONCE)
    assert gathered(loaded) == [set(), {("float32[8,8]", ())}]
    assert bytes_by_operation(in_loop) == {}


@pytest.mark.slow
def test_a_shard_map_gathers_for_itself():
    def loss(params, x):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return mlp(params, x)

        @jax.shard_map(mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"))
        def layer(h, weight, b):
            return jnp.tanh(h @ lax.all_gather(weight, "data", tiled=True) + b)

        h = mpmd.mark_stage_end(layer(x, params[0]["w"] * 2 / 2, params[0]["b"]))
        return mean(jnp.tanh(h @ params[1]["w"] + params[1]["b"]))

    loaded, in_loop, _ = run(train(loss), mlp_weights(), MANY_ROWS, in_specs=FSDP, **ONCE)
    assert gathered(loaded) == [set(), {("float32[8,8]", ())}]
    assert [c.operation for c in in_loop["fwd_0"]] == ["all-gather"]
    assert in_loop["fwd_1"] == ()


def test_groups_of_different_sizes():
    """A group with one device along the axis has nothing to gather."""
    mesh = uneven_mesh_of({"data": 4}, {"data": 1})
    loaded = assert_parity(train(mlp), mlp_weights(), MANY_ROWS, mesh=mesh, in_specs=FSDP, **ONCE)
    assert gathered(loaded) == [{("float32[8,8]", ())}, set()]


@pytest.mark.parametrize("specs", [(P(), BATCH), ([{"w": P(None, "data"), "b": P()}] * 2, P())])
def test_plans_without_such_weights_do_not_change(specs):
    once, often = (
        planned(train(mlp), mlp_weights(), MANY_ROWS, axes={"data": 2}, in_specs=specs, gather=how).plan
        for how in ("step", "task")
    )
    assert once == often


def test_the_reader_behind_the_copy_is_explained(once):
    loaded, *_ = once
    read_by = [use.task for use in mpmd.explain(loaded).leaf("[0][1]['w']").input.read_by]
    assert read_by == ["before_0", "after_0", "fwd_1", "bwd_1"]


def test_another_option_is_refused():
    message = "gather must be one of 'task', 'step', not 'auto'"
    with mesh_of(1) as mesh, pytest.raises(ValueError, match=message):
        mpmd.jit(train(mlp), mesh, gather="auto")


@pytest.mark.slow
def test_a_sharded_optimizer_state_updates_whole_weights():
    """ZeRO-1: weights are gathered when they have been updated."""
    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(state, xs):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(mlp)(params, x), xs, ONE_F_ONE_B, operation=mpmd.Add
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = init(mlp_weights(), optimizer)
    specs = (P(), jax.tree.map(lambda leaf: P("data") if leaf.ndim == 2 else P(), state[1]))
    loaded, in_loop, outside = run(step, state, MANY_ROWS, in_specs=(specs, BATCH))
    assert bytes_by_operation(in_loop) == {}
    assert bytes_by_operation(outside) == {"all-gather": 2 * WEIGHT, "all-reduce": 2 * (WEIGHT + BIAS) + 4}
    assert {leaf.spec for leaf in loaded.plan.outputs if "['w']" in leaf.path} == {(), ("data",)}

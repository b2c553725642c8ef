"""Sums over a sharded batch: what crosses the devices of a group, in microbatches and once per step.

Counted in the programs that XLA compiled, for steps whose results are those of plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.collectives import bytes_by_operation, collectives_of
from tests.support.models import FromZeros, descend, planned
from tests.support.parity import assert_parity_on, mesh_of
from tests.support.sharded_batches import (
    BATCH,
    BIAS,
    FSDP,
    IN_PARTS,
    MANY_ROWS,
    MICROBATCHES,
    ONE_F_ONE_B,
    ROWS,
    STACKED,
    WEIGHT,
    XS,
    D,
    casts_of_weights,
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


@pytest.mark.usual("weights that a checkpointed scan shares", "weight penalty")
@pytest.mark.parametrize(("loss", "params", "xs"), IN_PARTS.values(), ids=IN_PARTS)
def test_nothing_crosses_devices_in_a_microbatch(loss, params, xs):
    """Data parallel: each weight's gradient, and the loss, are reduced once per step."""
    tolerance = 1e-2 if loss is casts_of_weights else 2e-5
    _, in_loop, outside = run(train(on_second_stage(loss)), with_first(params), xs, tolerance=tolerance)
    assert bytes_by_operation(in_loop) == {}
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert bytes_by_operation(outside) == {"all-reduce": gradients + 4}


@pytest.mark.slow
def test_without_partial_sums_every_microbatch_reduces():
    _, in_loop, outside = run(train(mlp), mlp_weights(), XS, partial_sums="none")
    assert bytes_by_operation(in_loop) == {"all-reduce": 2 * (WEIGHT + BIAS) + 4}
    assert bytes_by_operation(outside) == {}


def test_fully_sharded_weights_are_gathered_and_their_gradients_reduced():
    loaded, in_loop, outside = run(train(mlp), mlp_weights(), MANY_ROWS, in_specs=FSDP)
    assert bytes_by_operation(in_loop) == {"all-gather": 3 * WEIGHT, "all-reduce": 2 * WEIGHT}
    assert bytes_by_operation(outside) == {"all-reduce": 2 * BIAS + 4}
    assert accumulator_specs(loaded) == {((D, D), ("data",)), ((2, D), ("data",)), ((2,), ("data",))}


def test_fully_sharded_gradients_in_parts_leave_only_gathers():
    """``all``: each device accumulates the whole gradient, and scatters its sum once."""
    step = train(mlp)
    loaded, in_loop, _ = run(step, mlp_weights(), MANY_ROWS, in_specs=FSDP, partial_sums="all")
    assert bytes_by_operation(in_loop) == {"all-gather": 3 * WEIGHT}
    assert accumulator_specs(loaded) == {((2, D, D), ("data",)), ((2, D), ("data",)), ((2,), ("data",))}
    assert {leaf.spec for leaf in loaded.plan.outputs if leaf.path.endswith("['w']")} == {("data",)}


def accumulator_specs(loaded):
    """The shape and spec of all that backwards and forwards update in place."""
    return {
        (e.inputs[i].shape, e.in_specs[i])
        for e in loaded.plan.executables
        if e.name.startswith(("fwd", "bwd"))
        for i in e.donated
        if (e.inputs[i], e.in_specs[i]) in zip(e.outputs, e.out_specs, strict=True)
    } & {
        (e.outputs[i].shape, e.out_specs[i])
        for e in loaded.plan.executables
        if e.name.startswith("before")
        for i in range(len(e.outputs))
    }


def test_accumulators_in_parts_are_donated_and_shown():
    loaded, _, _ = run(train(mlp), mlp_weights(), XS)
    assert accumulator_specs(loaded) == {((2, D, D), ("data",)), ((2, D), ("data",)), ((2,), ("data",))}
    assert "float32[2,8,8] sharded ('data',)" in str(loaded.plan)
    assert "of what is accumulated over the microbatches by" in str(mpmd.explain(loaded).leaf("[0][1]['w']"))


def test_tensor_parallel_weights_reduce_activations_alone():
    """Megatron's MLP: an all-reduce of activations in the forward, none for gradients of weights."""

    def loss(params, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ params["first"]))
        return mean(jnp.tanh(h @ params["up"] + params["b"]) @ params["down"])

    params = {"first": w, "up": normal(3, D, 16), "b": jnp.zeros(16), "down": normal(4, 16, D)}
    spec = {"first": P(), "up": P(None, "model"), "b": P("model"), "down": P("model")}
    _, in_loop, _ = run(train(loss), params, XS, in_specs=(spec, BATCH), axes={"data": 2, "model": 2})
    shapes = {shape for found in in_loop.values() for collective in found for shape in collective.shapes}
    assert shapes == {(ROWS // 2, D)}


@pytest.mark.slow
def test_what_a_constraint_splits_is_not_in_parts():
    """Sequence parallel: the gradient of an activation is summed, and split where the user says so."""

    def loss(params, x):
        first = lax.with_sharding_constraint(x * params["scale"], P("data", "model"))
        h = mpmd.mark_stage_end(lax.with_sharding_constraint(first, P("data")) @ params["up"])
        return mean(jnp.tanh(h) @ params["down"])

    params = {"scale": jnp.ones(D), "up": normal(3, D, 16), "down": normal(4, 16, D)}
    spec = {"scale": P(), "up": P(None, "model"), "down": P("model")}
    sequences = P(None, "data", "model")
    xs = normal(1, MICROBATCHES, ROWS, 4, D)
    with mesh_of(2, data=2, model=2) as mesh:
        with jax.set_mesh(mesh.jax_mesh):  # for plain JAX
            loaded = assert_parity_on(mesh, train(loss), params, xs, in_specs=(spec, sequences))
        in_loop, _ = collectives_of(loaded, mesh)
    activation = 4 * ROWS // 2 * 4 * D
    assert bytes_by_operation({"bwd_0": in_loop["bwd_0"]}) == {"all-reduce": activation}


@pytest.mark.slow
def test_of_two_axes_the_replicated_one_is_in_parts():
    """Hybrid sharding: the batch along both axes, weights along one."""
    specs = ([{"w": P("fsdp"), "b": P()}] * 2, P(None, ("replica", "fsdp")))
    loaded, in_loop, _ = run(train(mlp), mlp_weights(), XS, in_specs=specs, axes={"replica": 2, "fsdp": 2})
    assert ((2, D, D), ("replica", "fsdp")) in accumulator_specs(loaded)
    assert ((4, D), (("replica", "fsdp"),)) in accumulator_specs(loaded)
    assert (D, D) not in {
        s for found in in_loop.values() for c in found for s in c.shapes if c.nbytes > WEIGHT
    }


def test_halves_of_a_scanned_backward():
    step = train(on_second_stage(functools.partial(scanned, wrap=jax.checkpoint)), mpmd.ZeroBubble(2))
    _, in_loop, _ = run(step, with_first(STACKED), XS)
    assert bytes_by_operation(in_loop) == {}


class Mean(FromZeros):
    """Is linear."""

    def update(self, state, update, index):
        return state + update / MICROBATCHES


@pytest.mark.usual("greatest loss")
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Mean(), {}),
        ((mpmd.Max, mpmd.Add), {"all-reduce": 4}),
        ((mpmd.Add, mpmd.Concat(1)), {}),
        ((mpmd.Add, mpmd.Max), {"all-reduce": 2 * (WEIGHT + BIAS)}),
    ],
    ids=["mean", "greatest loss", "stacked gradients", "greatest gradients"],
)
def test_operations(operation, expected):
    """What is linear stays in parts; a maximum needs every sum."""

    def step(params, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(mlp)(params, x), xs, schedule=ONE_F_ONE_B, operation=operation
        )
        return params, (value, grads)

    _, in_loop, _ = run(step, mlp_weights(), XS, donate_argnums=())
    assert bytes_by_operation(in_loop) == expected


def test_gradients_that_are_read_in_the_loop_stay_whole():
    def step(params, xs):
        def one(x):
            value, grads = jax.value_and_grad(mlp)(params, x)
            return value, grads, jnp.sqrt(jnp.sum(grads[1]["w"] ** 2))

        value, grads, norm = mpmd.treduce(one, xs, ONE_F_ONE_B, operation=mpmd.Add)
        return descend(params, grads), (value, norm)

    _, in_loop, outside = run(step, mlp_weights(), XS)
    assert bytes_by_operation(in_loop) == {"all-reduce": WEIGHT}
    assert bytes_by_operation(outside) == {"all-reduce": WEIGHT + 2 * BIAS + 4}


@pytest.mark.slow
def test_sums_without_a_rule_stay_whole():
    """The gradient of a convolution's kernel."""

    def loss(params, x):
        h = lax.conv_general_dilated(x[:, None], params["kernel"], (1,), "SAME")
        return mean(jnp.tanh(h).sum(1) @ params["w"])

    params = with_first({"kernel": normal(3, 2, 1, 3), "w": w})
    _, in_loop, _ = run(train(on_second_stage(loss)), params, XS)
    assert bytes_by_operation(in_loop) == {"all-reduce": 4 * params["second"]["kernel"].size}


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [((P(), P()), (2, 2)), (([{"w": P(None, "data"), "b": P()}] * 2, P()), (2, 2)), ((P(), BATCH), (4, 2))],
    ids=["replicated", "sharded weights", "groups of unequal sizes"],
)
def test_plans_without_a_batch_that_all_groups_shard_alike_do_not_change(specs, sizes):
    step, params = train(mlp), mlp_weights()
    mesh = mpmd.AbstractMpmdMesh([{"data": size} for size in sizes])
    plans = [
        mpmd.jit(step, mesh, in_specs=specs, partial_sums=how).lower(params, XS).plan
        for how in ("replicated", "none")
    ]
    assert plans[0] == plans[1]


def test_rematerialized_functions_stay():
    loss = on_second_stage(functools.partial(scanned, wrap=jax.checkpoint))
    specs = P(), BATCH
    loaded = planned(train(loss), with_first(STACKED), XS, axes={"data": 2}, in_specs=specs)
    jaxprs = [str(j) for (_, task), j in loaded.compiled.program.jaxprs.items() if "bwd_1" in str(task)]
    assert jaxprs and all("checkpoint[" in text or "remat2[" in text for text in jaxprs)


def test_another_option_is_refused():
    with (
        mesh_of(1) as mesh,
        pytest.raises(ValueError, match="partial_sums must be one of 'replicated', 'all'"),
    ):
        mpmd.jit(train(mlp), mesh, partial_sums="some")

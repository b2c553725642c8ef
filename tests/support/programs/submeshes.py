"""Groups of several devices: what is sharded within a group, and how."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, descend, init, layer, make_step, mlp, mse, squares, weights
from tests.support.programs.table import Case, loop, program, train

ADAM = optax.adam(1e-2, eps=1e-3)
ROWS = P(None, "fsdp")
"""Of a batch (microbatches, rows, width): the rows."""


def like_parameters(state, spec):
    """The specs of parameters for every leaf of the state that has the shape of one."""
    return jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else P(), state)


@program({"schedule": mpmd.Std1F1B(3), "fused": mpmd.DualPipeV(4, 2)})
def fully_sharded_and_gathered_once(schedule):
    """A table that two groups share, layers, and the state of an optimizer, which stays sharded."""

    def loss(params, x, y):
        h = x @ params["table"]
        for p in params["layers"]:
            h = mpmd.mark_stage_end(layer(p, h))
        return squares(h @ params["table"].T, y)

    def holds(loaded):
        for e in loaded.plan.executables:
            made = zip(e.outputs, e.out_specs, strict=True)
            whole = any(aval.shape == (4, 4) and not any(spec) for aval, spec in made)
            assert whole == e.name.startswith("before"), e

    params = {"table": jnp.eye(4), "layers": weights(schedule.num_stages - 1)}
    state = init(params, ADAM)
    step = make_step(loss, schedule, ADAM)
    specs = (like_parameters(state, P("fsdp")), ROWS, ROWS)
    options = {"in_specs": specs, "partial_sums": "all", "gather": "step"}
    return Case(step, state, batch(8), schedule.mpmd_dim, {"fsdp": 2}, options, holds=holds)


@program()
def specs_of_the_results():
    specs = like_parameters(init(weights(2)), P("fsdp"))

    def holds(loaded):
        by_path = {leaf.path: leaf.spec for leaf in loaded.plan.outputs}
        assert by_path["[1][1][0]['w']"] == (None, "fsdp"), f"a gradient has {by_path}"

    gradients = [{"w": P(None, "fsdp"), "b": P()}] * 2
    options = {"in_specs": (specs, ROWS, ROWS), "out_specs": (specs, (P(), gradients))}
    return train(mse, weights(2), 2, axes={"fsdp": 2}, options=options, holds=holds)


@program()
def constraints_within_stages():
    def constrained(h, *spec):
        """Under plain JAX there is no mesh for a constraint to be about."""
        return h if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(h, P(*spec))

    def loss(params, x, y):
        h = mlp(params, x, lambda p, h: constrained(layer(p, h), "fsdp", None))
        return squares(constrained(h, None, "fsdp"), y)

    return train(loss, weights(2), 2, axes={"fsdp": 2}, options={"in_specs": (P(), ROWS, ROWS)})


@program()
def evaluation_with_stacked_outputs():
    def step(state, xs):
        outputs = mpmd.treduce(lambda x: mlp(state, x), xs, mpmd.GPipe(2), operation=mpmd.Concat())
        return state, outputs

    return Case(step, weights(2), batch()[:1], 2, {"fsdp": 2}, {"in_specs": (P(), ROWS)})


@program()
def gradients_divided_by_a_token_count():
    def step(state, xs, ys):
        def loss(params, x, y):
            mask = y[..., 0] > 0
            return jnp.sum(jnp.mean((mlp(params, x) - y) ** 2, -1) * mask), mask.sum()

        (total, count), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y), (xs, ys), 2
        )
        return descend(state, grads, 0.1 / count), total / count

    return Case(step, weights(2), batch(), 2, {"fsdp": 2}, {"in_specs": (P("fsdp"), ROWS, ROWS)})


@program()
def fused_tasks_that_accumulate():
    """The backward in a fused task is of another microbatch, and its accumulators have the same specs."""
    schedule = mpmd.Interleaved1F1B(4, 2, fuse_steady_state=True)

    def step(state, xs, ys):
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(state, *mb),
            (xs, ys),
            schedule=schedule,
            operation=(mpmd.Add, mpmd.Concat()),
        )
        return descend(state, jax.tree.map(lambda g: g.sum(0), grads)), (loss, grads)

    specs = like_parameters(weights(4), P(None, "fsdp"))
    return Case(step, weights(4), batch(8), 2, {"fsdp": 2}, {"in_specs": (specs, P(), P())})

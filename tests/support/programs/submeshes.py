"""Groups of several devices: what is sharded within a group, and how."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import SGD, batch, init, layer, make_step, mlp, mse, weights
from tests.support.programs.table import Case, descend, loop, program

ADAM = optax.adam(1e-2, eps=1e-3)
ROWS = P(None, "fsdp")
"""Of a batch (microbatches, rows, width): the rows."""


def case(axes, specs, loss=mse, optimizer=SGD, stages=2, params=None, **options):
    """``specs`` are for the state, and for each array of the batch."""
    step = make_step(loss, mpmd.Std1F1B(stages), optimizer)
    state = init(params or weights(stages), optimizer)
    holds = options.pop("holds", None)
    return Case(step, state, batch(), stages, axes, {"in_specs": specs, **options}, holds=holds)


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
        return jnp.mean((h @ params["table"].T - y) ** 2)

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
    return case({"fsdp": 2}, (specs, ROWS, ROWS), out_specs=(specs, (P(), gradients)), holds=holds)


@program()
def constraints_within_stages():
    def loss(params, x, y):
        h = x
        for i, p in enumerate(params):
            h = jax.lax.with_sharding_constraint(layer(p, h), P("fsdp", None))
            if i < 1:
                h = mpmd.mark_stage_end(h)
        h = jax.lax.with_sharding_constraint(h, P(None, "fsdp"))
        return jnp.mean((h - y) ** 2)

    def plain(params, x, y):
        return jnp.mean((mlp(params, x) - y) ** 2)

    return case({"fsdp": 2}, (P(), ROWS, ROWS), loss_with_and_without_a_mesh(loss, plain))


def loss_with_and_without_a_mesh(sharded, plain):
    """What plain JAX runs has no mesh for constraints to be about."""

    def loss(*args):
        return (plain if jax.sharding.get_abstract_mesh().empty else sharded)(*args)

    return loss


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


def tiny_transformer(params, x, y):
    """An embedding, scanned layers with attention that are rematerialized, and a head, in two stages."""

    @jax.checkpoint
    def attend(h, p):
        scores = jnp.einsum("bsd,btd->bst", h @ p["query"], h)
        return h + jnp.tanh(jax.nn.softmax(scores) @ h @ p["value"]), None

    tokens, targets = jnp.int32(x > 0) + 2, jnp.int32(y > 0)
    h = params["table"][tokens] + params["positions"][: tokens.shape[-1]]
    h = mpmd.mark_stage_end(jax.lax.scan(attend, h, params["first"])[0])
    h = jax.lax.scan(attend, h, params["second"])[0]
    picked = jnp.take_along_axis(jax.nn.log_softmax(h @ params["head"]), targets[..., None], -1)
    weights = jnp.float32(y > -1)
    return -jnp.sum(picked[..., 0] * weights) / jnp.sum(weights)


def tiny_transformer_parameters():
    layers = {"query": jnp.stack([jnp.eye(4)] * 2), "value": jnp.stack([weights(1)[0]["w"]] * 2)}
    table = jnp.sin(jnp.arange(16.0)).reshape(4, 4)
    return {"table": table, "positions": table / 2, "first": layers, "second": layers, "head": table.T}


@program(
    {
        "1F1B": (mpmd.Std1F1B(2), "replicated", P()),
        "zero bubble": (mpmd.ZeroBubble(2), "replicated", P()),
        "FSDP": (mpmd.Std1F1B(2), "all", P("fsdp")),
        "no partial sums": (mpmd.Std1F1B(2), "none", P()),
    },
)
def data_parallel_transformer(variant):
    schedule, partial_sums, spec = variant

    def holds(loaded):
        parts = [
            e for e in loaded.plan.executables if e.name.startswith("before") and ("fsdp",) in e.out_specs
        ]
        assert bool(parts) == (partial_sums != "none")

    step = make_step(tiny_transformer, schedule, SGD)
    state = init(tiny_transformer_parameters(), SGD)
    specs = (jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else P(), state), ROWS, ROWS)
    options = {"in_specs": specs, "partial_sums": partial_sums}
    return Case(step, state, batch(), 2, {"fsdp": 2}, options, holds=holds)


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

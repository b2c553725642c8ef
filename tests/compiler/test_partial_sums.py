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
from tests.support.parity import assert_parity_on, mesh_of

D = 8
MICROBATCHES, ROWS = 2, 4
BATCH = P(None, "data")
ONE_F_ONE_B = mpmd.Std1F1B(2)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype) * 0.3


def tokens(*shape):
    return jax.random.randint(jax.random.key(9), shape, 0, D)


XS = normal(1, MICROBATCHES, ROWS, D)
TOKENS = tokens(MICROBATCHES, ROWS, 3)


def on_second_stage(loss):
    """``loss`` behind a stage that has nothing to do with it, as a loop needs two."""

    def staged(params, x):
        first = lax.stop_gradient(params["first"])
        zero = mpmd.mark_stage_end(jnp.dot(first, first))
        return loss(params["second"], x + zero.astype(x.dtype))

    return staged


def train(loss, schedule=ONE_F_ONE_B, operation=mpmd.Add):
    """A step of gradient descent; ``loss`` takes parameters and a microbatch."""

    def step(params, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule, operation=operation
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), value

    return step


def run(step, params, xs, axes=None, tolerance=2e-5, **options):
    """Compares a step with plain JAX. Returns it, its collectives in microbatches, and those outside."""
    with mesh_of(2, **(axes or {"data": 2})) as mesh:
        options = {"in_specs": (P(), BATCH), "donate_argnums": 0, **options}
        loaded = assert_parity_on(mesh, step, params, xs, tolerance=tolerance, **options)
        return loaded, *collectives_of(loaded, mesh)


def with_first(params):
    return {"first": jnp.zeros(3), "second": params}


def mean(h):
    return jnp.mean(h**2)


def dense(params, x):
    return mean(jnp.tanh(x @ params["w"] + params["b"]) * params["scale"][:, None].T)


def embedded(params, x):
    h = params["table"][x] + params["positions"][: x.shape[1]]
    logits = h @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), x[..., None], -1))


def scanned(params, x, wrap=lambda f: f):
    """A scan over layers, whose gradients are stacked."""

    def layer(h, p):
        return h + jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"], None

    return mean(lax.scan(wrap(layer), x, params)[0])


def shared_in_scan(params, x, wrap=lambda f: f):
    """A scan over time with the same weights, whose gradients are carried."""
    return mean(lax.scan(wrap(lambda h, _: (jnp.tanh(h @ params["w"]), h)), x, None, length=3)[0])


def nested_scans(params, x):
    def layer(h, w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)[0], None

    return mean(lax.scan(layer, x, params["layers"])[0])


def indexed_layers(params, x):
    for i in range(2):
        x = jnp.tanh(x @ params["layers"][i])
    return mean(x)


def split_weights(params, x):
    q, k = jnp.split(params["qk"], 2, axis=-1)
    joined = jnp.concatenate([params["a"], params["b"]])
    return mean((x @ q) * (x @ k) @ joined)


def masked_weights(params, x):
    mask = jnp.arange(D)[:, None] >= jnp.arange(D)
    return mean(x @ jnp.where(mask, params["w"], 0.0)) + mean(x @ (params["v"] * mask))


def weight_penalty(params, x):
    return mean(x @ params["w"]) + 0.1 * jnp.sum(params["w"] ** 2)


def low_rank(params, x):
    return mean(jnp.tanh(x @ (params["w"] + params["a"] @ params["b"])))


def casts_of_weights(params, x):
    h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    return mean(h.astype(jnp.float32))


def used_twice(params, x):
    return mean(jnp.tanh(x @ params["w"]) @ params["w"].T)


def scaled_loss(params, x):
    return dense(params, x) * 1024.0 / params["scale"].shape[0]


def checkpointed(params, x):
    return mean(jax.checkpoint(lambda h: jnp.tanh(jnp.tanh(h @ params["w"]) @ params["w"]))(x))


def merged_dimensions(params, x):
    h = x.reshape(ROWS, 2, D // 2)
    h = jnp.einsum("btd,df->btf", h, params["w"]).reshape(-1, D // 2)
    return mean(jnp.tanh(h) @ params["w"])


def picked_logits(params, x):
    """A cross entropy by indexing, whose transposition scatters."""
    logits = jax.nn.log_softmax(params["table"][x[:, 0]] @ params["head"])
    return -jnp.mean(logits[jnp.arange(ROWS), x[:, 1]])


def under_jit(params, x):
    return jax.jit(dense)(params, x)


w = normal(2, D, D)
LAYERS = {"layers": normal(3, 2, D, D)}
STACKED = {"up": normal(4, 2, D, 2 * D), "b": normal(5, 2, 2 * D), "down": normal(6, 2, 2 * D, D)}
DENSE = {"w": w, "b": jnp.zeros(D), "scale": jnp.ones(D)}
TABLE = {"table": normal(7, D, 4), "positions": normal(8, 5, 4)}

IN_PARTS = {
    "dense": (dense, DENSE, XS),
    "embedded": (embedded, TABLE, TOKENS),
    "scan over layers": (scanned, STACKED, XS),
    "checkpointed scan": (functools.partial(scanned, wrap=jax.checkpoint), STACKED, XS),
    "weights that a scan shares": (shared_in_scan, {"w": w}, XS),
    "weights that a checkpointed scan shares": (
        functools.partial(shared_in_scan, wrap=jax.checkpoint),
        {"w": w},
        XS,
    ),
    "nested scans": (nested_scans, LAYERS, XS),
    "indexed layers": (indexed_layers, LAYERS, XS),
    "split weights": (split_weights, {"qk": normal(3, D, 2 * D), "a": w[:3], "b": w[3:]}, XS),
    "masked weights": (masked_weights, {"w": w, "v": w}, XS),
    "weight penalty": (weight_penalty, {"w": w}, XS),
    "low rank": (low_rank, {"w": w, "a": normal(3, D, 2), "b": normal(4, 2, D)}, XS),
    "casts of weights": (casts_of_weights, {"w": w}, XS),
    "used twice": (used_twice, {"w": w}, XS),
    "scaled loss": (scaled_loss, DENSE, XS),
    "checkpointed": (checkpointed, {"w": w}, XS),
    "merged dimensions": (merged_dimensions, {"w": normal(2, D // 2, D // 2)}, XS),
    "under jit": (under_jit, DENSE, XS),
}


@pytest.mark.parametrize(("loss", "params", "xs"), IN_PARTS.values(), ids=IN_PARTS)
def test_nothing_crosses_devices_in_a_microbatch(loss, params, xs):
    """Data parallel: each weight's gradient, and the loss, are reduced once per step."""
    tolerance = 1e-2 if loss is casts_of_weights else 2e-5
    _, in_loop, outside = run(train(on_second_stage(loss)), with_first(params), xs, tolerance=tolerance)
    assert bytes_by_operation(in_loop) == {}
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert bytes_by_operation(outside) == {"all-reduce": gradients + 4}


def test_what_else_crosses_devices_stays():
    """XLA gathers the indices of this cross entropy; the gradients are in parts nevertheless."""
    step = train(on_second_stage(picked_logits))
    _, in_loop, _ = run(step, with_first({"table": w, "head": w}), TOKENS)
    shapes = {shape for found in in_loop.values() for collective in found for shape in collective.shapes}
    assert shapes and w.shape not in shapes


def mlp(params, x):
    for i, p in enumerate(params):
        x = jnp.tanh(x @ p["w"] + p["b"])
        if i < len(params) - 1:
            x = mpmd.mark_stage_end(x)
    return mean(x)


def mlp_weights(layers=2):
    return [{"w": normal(i, D, D), "b": jnp.zeros(D)} for i in range(layers)]


FSDP = ([{"w": P("data"), "b": P()}] * 2, BATCH)
MANY_ROWS = normal(1, MICROBATCHES, 64, D)
"""More than weights are large, so that XLA moves weights and not activations."""
WEIGHT, BIAS = 4 * D * D, 4 * D


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
    step, options = train(loss), {"in_specs": (spec, BATCH), "axes": {"data": 2, "model": 2}}
    _, in_loop, _ = run(step, params, XS, **options)
    shapes = {shape for found in in_loop.values() for collective in found for shape in collective.shapes}
    assert shapes == {(ROWS // 2, D)}
    _, reduced, _ = run(step, params, XS, partial_sums="none", **options)
    weights = 4 * (params["first"].size + (params["up"].size + params["b"].size + params["down"].size) // 2)
    saved = bytes_by_operation(reduced)["all-reduce"] - bytes_by_operation(in_loop)["all-reduce"]
    assert saved == weights + 4


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


def test_of_two_axes_the_replicated_one_is_in_parts():
    """Hybrid sharding: the batch along both axes, weights along one."""
    specs = ([{"w": P("fsdp"), "b": P()}] * 2, P(None, ("replica", "fsdp")))
    loaded, in_loop, _ = run(train(mlp), mlp_weights(), XS, in_specs=specs, axes={"replica": 2, "fsdp": 2})
    assert ((2, D, D), ("replica", "fsdp")) in accumulator_specs(loaded)
    assert ((4, D), (("replica", "fsdp"),)) in accumulator_specs(loaded)
    assert (D, D) not in {
        s for found in in_loop.values() for c in found for s in c.shapes if c.nbytes > WEIGHT
    }


@pytest.mark.parametrize(
    "schedule",
    [mpmd.ZeroBubble(2), mpmd.Interleaved1F1B(4, 2), mpmd.DualPipeV(4, 2)],
    ids=lambda schedule: schedule.name,
)
def test_schedules(schedule):
    """Halves of backwards, several stages on a group, and fused tasks."""
    params = mlp_weights(schedule.num_stages)
    _, in_loop, _ = run(train(mlp, schedule), params, normal(1, 8, ROWS, D))
    assert bytes_by_operation(in_loop) == {}


def test_halves_of_a_scanned_backward():
    step = train(on_second_stage(functools.partial(scanned, wrap=jax.checkpoint)), mpmd.ZeroBubble(2))
    _, in_loop, _ = run(step, with_first(STACKED), XS)
    assert bytes_by_operation(in_loop) == {}


class Mean:
    """An operation of the user's own, which is linear."""

    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state, update, index):
        return state + update / MICROBATCHES


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ((mpmd.Concat(), mpmd.Add), {}),
        (Mean(), {}),
        ((mpmd.Max, mpmd.Add), {"all-reduce": 4}),
        ((mpmd.Add, mpmd.Concat(1)), {}),
        ((mpmd.Add, mpmd.Max), {"all-reduce": 2 * (WEIGHT + BIAS)}),
    ],
    ids=["stacked losses", "mean", "greatest loss", "stacked gradients", "greatest gradients"],
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
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, norm)

    _, in_loop, outside = run(step, mlp_weights(), XS)
    assert bytes_by_operation(in_loop) == {"all-reduce": WEIGHT}
    assert bytes_by_operation(outside) == {"all-reduce": WEIGHT + 2 * BIAS + 4}


def test_sums_without_a_rule_stay_whole():
    """The gradient of a convolution's kernel."""

    def loss(params, x):
        h = lax.conv_general_dilated(x[:, None], params["kernel"], (1,), "SAME")
        return mean(jnp.tanh(h).sum(1) @ params["w"])

    params = with_first({"kernel": normal(3, 2, 1, 3), "w": w})
    _, in_loop, _ = run(train(on_second_stage(loss)), params, XS)
    assert bytes_by_operation(in_loop) == {"all-reduce": 4 * params["second"]["kernel"].size}


@pytest.mark.parametrize("specs", [(P(), P()), ([{"w": P(None, "data"), "b": P()}] * 2, P())])
def test_plans_without_a_sharded_batch_do_not_change(specs):
    step, params = train(mlp), mlp_weights()
    with mesh_of(2, data=2) as mesh:
        plans = [
            mpmd.mpmd_jit_with_loop(step, mesh, in_specs=specs, partial_sums=how).compile(params, XS).plan
            for how in ("replicated", "none")
        ]
    assert plans[0] == plans[1]


def test_rematerialized_functions_stay():
    loss = on_second_stage(functools.partial(scanned, wrap=jax.checkpoint))
    loaded, _, _ = run(train(loss), with_first(STACKED), XS)
    jaxprs = [str(j) for (_, task), j in loaded.compiled.program.jaxprs.items() if "bwd_1" in str(task)]
    assert jaxprs and all("checkpoint[" in text or "remat2[" in text for text in jaxprs)


def test_another_option_is_refused():
    with (
        mesh_of(1) as mesh,
        pytest.raises(ValueError, match="partial_sums must be one of 'replicated', 'all'"),
    ):
        mpmd.mpmd_jit_with_loop(train(mlp), mesh, partial_sums="some")

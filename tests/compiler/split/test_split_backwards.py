"""Schedules that run the gradient of a stage's input and that of its weights as tasks of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.ir.plan import Run, Task
from tests.support.levels import task_graph
from tests.support.models import batch, init, keys, layer, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of


@dataclasses.dataclass(frozen=True)
class WeightsLast(mpmd.Schedule):
    """All forwards, all backwards of which every third is whole, then the gradients of weights."""

    def tasks(self, num_microbatches):
        whole = range(2, num_microbatches, 3)
        halved = [i for i in range(num_microbatches) if i not in whole]
        return [
            [
                *(Task("fwd", stage, i) for i in range(num_microbatches)),
                *(Task("bwd" if i in whole else "bwdA", stage, i) for i in range(num_microbatches)),
                *(Task("bwdW", stage, i) for i in halved),
            ]
            for stage in range(self.num_stages)
        ]


def check(loss, params, stages):
    step = make_step(loss, WeightsLast(stages, stages))
    return assert_parity(step, init(params), *batch(4), mesh=mesh_of(stages))


def through(stage):
    def loss(params, x, y):
        h = x
        for p in params:
            h = mpmd.mark_stage_end(stage(p, h))
        return jnp.mean((h - y) ** 2)

    return loss


def stacked_weights(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(layers))


def runs(loaded, group):
    return [i for i in loaded.plan.programs[group].instructions if isinstance(i, Run)]


def products(loss, params, stages):
    """How many matrix products each work of the loop has, those of a scan once for each iteration."""
    step = make_step(loss, WeightsLast(stages, stages))
    graph = task_graph(step, init(params), *batch(4), groups=stages)
    return {str(stage.work): count_products(stage.eqns) for stage in graph.stage_work}


def count_products(eqns):
    total = 0
    for eqn in eqns:
        inner = sum(count_products(jaxpr.eqns) for jaxpr in subjaxprs(eqn))
        total += (eqn.primitive.name == "dot_general") + inner * eqn.params.get("length", 1)
    return total


def test_halves_and_whole_backwards_of_one_stage():
    loaded = check(mse, weights(3), 3)
    labels = [run.label for run in runs(loaded, 1)]
    assert labels.index("bwdA_1__3") < labels.index("bwdW_1__0")
    assert "bwd_1__2" in labels


def scanned(stage, h):
    return jax.lax.scan(lambda h, p: (layer(p, h), None), h, stage)[0]


def scanned_with_checkpoints(stage, h):
    return jax.lax.scan(lambda h, p: (jax.checkpoint(layer)(p, h), None), h, stage)[0]


def scanned_with_a_shared_weight(stage, h):
    shared = stage["w"][0]
    return jax.lax.scan(lambda h, p: (jnp.tanh(layer(p, h) + h @ shared), h), h, stage)[0]


def scanned_twice(stage, h):
    return jax.lax.scan(lambda h, _: (scanned(stage, h) / 2, None), h, None, length=2)[0]


def scanned_again_in_the_backward(stage, h):
    def body(h, _):
        return jnp.tanh(h @ stage["w"][0]) + stage["b"][0], None

    return jax.checkpoint(lambda h: jax.lax.scan(body, h, None, length=2)[0])(h)


def test_a_result_that_a_scan_passes_on_is_no_result_of_the_scan():
    check(through(scanned_again_in_the_backward), [stacked_weights(1) for _ in range(2)], 2)


@pytest.mark.usual("scan", "nested")
@pytest.mark.parametrize(
    ("stage", "forward", "halves"),
    [
        (scanned, 3, (3, 3)),
        (scanned_with_checkpoints, 3, (6, 3)),
        (scanned_with_a_shared_weight, 6, (6, 6)),
        (scanned_twice, 6, (6, 6)),
    ],
    ids=["scan", "checkpoint", "shared", "nested"],
)
def test_a_scan_over_layers_is_taken_apart(stage, forward, halves):
    params = [stacked_weights(3) for _ in range(3)]
    check(through(stage), params, 3)
    counts = products(through(stage), params, 3)
    assert (counts["fwd_1"], (counts["bwdA_1"], counts["bwdW_1"])) == (forward, halves)


@pytest.mark.parametrize(
    ("wrapped", "halves"),
    [(jax.jit(layer), (1, 1)), (jax.checkpoint(layer), (2, 1))],
    ids=["jit", "checkpoint"],
)
def test_functions_are_opened_and_recomputed_once(wrapped, halves):
    check(through(wrapped), weights(3), 3)
    counts = products(through(wrapped), weights(3), 3)
    assert (counts["bwdA_1"], counts["bwdW_1"]) == halves


def test_a_conditional_has_a_half_for_each():
    def stage(p, h):
        return jax.lax.cond(jnp.sum(h) > 0, lambda: layer(p, h), lambda: h + p["b"])

    check(through(stage), weights(3), 3)


def test_stages_without_weights_or_input_gradient_have_one_half():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = mpmd.mark_stage_end(jnp.sin(h))
        return jnp.mean((layer(params[1], h) - y) ** 2)

    loaded = check(loss, weights(2), 3)
    assert {run.label[:4] for run in runs(loaded, 0) if run.label.startswith("bwd")} == {"bwdW", "bwd_"}
    assert {run.label[:4] for run in runs(loaded, 1) if run.label.startswith("bwd")} == {"bwdA", "bwd_"}


def test_tied_weights_and_auxiliary_losses():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        auxiliary = jnp.mean(h**2)
        h = mpmd.mark_stage_end(layer(params[1], h))
        auxiliary += jnp.mean(h**2) + sum(jnp.vdot(w, w) for w in jax.tree.leaves(params))
        return jnp.mean((layer(params[0], h) - y) ** 2) + 0.1 * auxiliary

    check(loss, weights(2), 3)


def test_keys_and_dropout():
    def step(state, xs, ys):
        params, key = state

        def loss(params, i):
            h, k = xs[i], jax.random.fold_in(key, i)
            for p in params:
                k, mine = jax.random.split(k)
                h = layer(p, h) * jax.random.bernoulli(mine, 0.5, h.shape)
                h, k = mpmd.mark_stage_end((h, k))
            return jnp.mean((h - ys[i]) ** 2)

        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(params, i), len(xs), WeightsLast(3, 3), mpmd.Add
        )
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), total

    assert_parity(step, (weights(3), keys(1)[0]), *batch(), mesh=mesh_of(3))


class Last:
    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state, update, index):
        return update


@dataclasses.dataclass(frozen=True)
class Descending(mpmd.Schedule):
    def tasks(self, num_microbatches):
        order = range(num_microbatches - 1, -1, -1)
        return [
            [Task(kind, stage, i) for kind in ("fwd", "bwd") for i in order]
            for stage in range(self.num_stages)
        ]


def test_any_order_of_microbatches_gives_the_sums_the_maxima_and_the_stacks():
    step = make_step(mse, Descending(3, 3))
    assert_parity(step, init(weights(3)), *batch(), mesh=mesh_of(3))


def test_an_operation_that_goes_by_order_refuses_another_one():
    def step(params, xs, ys):
        return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), Descending(2, 2), operation=Last())

    with mesh_of(2) as mesh, pytest.raises(mpmd.CompileError, match=r"runs fwd_1__3 before fwd_1__2, but a"):
        mpmd.jit(step, mpmd_mesh=mesh)(weights(2), *batch(4))

"""Callbacks into Python: called as ``jax.jit`` calls them, once, in the order of the traced step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import CallbackError
from mpmd.ir.plan import HostCall
from tests.support.models import batch, descend, layer, mse, planned, sgd_step, squares, weights
from tests.support.parity import assert_close, assert_like_jit, mesh_of
from tests.support.programs.scanned_layers import stacked
from tests.support.programs.table import by_index

SCHEDULE = mpmd.Std1F1B(2)


def step_of(tell, *schedules):
    """Returns a step with a loop for each schedule, or with one loop.

    It calls ``tell(name, i, value)`` in two stages, forward and backward, and before and after each loop.
    """

    def train(state, xs, ys, schedule):
        tell("before", -1, xs[0, 0])

        def loss(params, i):
            h = layer(params[0], xs[i])
            tell("first", i, h)
            h = mpmd.mark_stage_end(h)
            tell("mark", i, 0.5)
            tell("second", i, jax.lax.stop_gradient(h))
            out = squares(layer(params[1], h), ys[i])
            tell("loss", i, out)
            return out

        def of_microbatch(i):
            value, grads = jax.value_and_grad(loss)(state, i)
            tell("gradient", i, grads[0]["b"])
            return value, grads

        total, grads = mpmd.treduce_i(of_microbatch, len(xs), schedule, mpmd.Add)
        tell("after", -1, grads[1]["b"])
        return descend(state, grads), total

    def step(state, xs, ys):
        for schedule in schedules or (SCHEDULE,):
            state, total = train(state, xs, ys, schedule)
        return state, total

    return step


def in_order(step, mesh, seen, *args):
    """Runs a step as plain JAX does and on groups; compares what was called."""
    expected = jax.jit(step)(*args)
    jax.effects_barrier()
    wanted = list(seen)
    seen.clear()
    compiled = mpmd.jit(step, mesh)
    for _ in range(2):
        assert_close(jax.block_until_ready(compiled(*args)), expected)
        called = list(seen)
        seen.clear()
        assert [name for name, *_ in called] == [name for name, *_ in wanted]
        for one, other in zip(called, wanted, strict=True):
            assert_close(one[1:], other[1:])
    assert wanted
    return wanted


def noting(seen, **options):
    def tell(name, i, value):
        jax.debug.callback(lambda i, v: seen.append((name, int(i), np.asarray(v))), i, value, **options)

    return tell


def arguments():
    return (weights(2), *batch())


def test_the_order_of_the_traced_step(mesh):
    seen = []
    step = step_of(noting(seen, ordered=True), mpmd.ZeroBubble(2), SCHEDULE)
    wanted = in_order(step, mesh, seen, *arguments())
    names = [name for name, *_ in wanted]
    assert names == ["before", *["first", "mark", "second", "loss", "gradient"] * 4, "after"] * 2


def test_scans_conditionals_and_remat(mesh):
    seen = []
    tell = noting(seen, ordered=True)

    def twice(h, i):
        @jax.jit
        def body(h, k):
            tell("scan", 10 * i + k, h[0, 0])
            jax.lax.cond(
                (i + k) % 2 == 0,
                lambda: tell("even", i, h[0, 0]),
                lambda: jax.lax.scan(
                    lambda c, x: (c, tell("odd", x, c)), h[0, 0], jnp.arange(2), reverse=True
                )[1],
            )
            return jnp.tanh(h), None

        return jax.lax.scan(body, h, jnp.arange(3))[0]

    def loss(params, i, xs, ys):
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        h = h + 0 * twice(jax.lax.stop_gradient(h), i)
        return squares(layer(params[1], h), ys[i])

    wanted = in_order(by_index(loss), mesh, seen, *arguments())
    assert [(name, i) for name, i, _ in wanted[:5]] == [
        ("scan", 0), ("even", 0), ("scan", 1), ("odd", 1), ("odd", 0)
    ]  # fmt: skip


@pytest.mark.usual("layers")
@pytest.mark.parametrize("computed_again", ["nothing", "layers", "all layers"])
def test_scanned_layers_tell_on_their_groups(mesh, computed_again):
    """Each part of a scan tells of its own layers, as often as it runs."""
    seen = []
    tell = noting(seen)

    def loss(params, i, xs, ys):
        def body(h, p):
            h = layer(p, h)
            tell("layer", i, h[0, 0])
            return mpmd.mark_stage_end(h, num_stages=2), None

        def run(h, layers):
            once = jax.checkpoint(body) if computed_again == "layers" else body
            return jax.lax.scan(once, h, layers)[0]

        run = jax.checkpoint(run) if computed_again == "all layers" else run
        return squares(run(xs[i], params["layers"]), ys[i])

    step = by_index(loss)

    args = stacked(4), *batch()
    wanted = in_order(step, mesh, seen, *args)
    tells = [
        [one for one in program.instructions if isinstance(one, HostCall)]
        for program in planned(step, *args).plan.programs
    ]
    runs = 1 if computed_again == "nothing" else 2
    assert len(wanted) == 4 * 4 * runs and [len(of_group) for of_group in tells] == [4 * runs] * 2


@pytest.mark.parametrize("kind", ["io_callback", "ordered", "pure_callback"])
def test_a_callback_whose_result_is_read_runs_once_for_each_microbatch(mesh, kind):
    seen = []

    def note(index, value):
        seen.append(("note", int(index)))
        return value

    def loss(params, i, xs, ys):
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        value = jax.lax.stop_gradient(h[0, 0])
        if kind == "pure_callback":
            extra = jax.pure_callback(note, value, i, value)
        else:
            extra = io_callback(note, value, i, value, ordered=kind == "ordered")
        return squares(layer(params[1], h), ys[i]) + extra

    wanted = in_order(by_index(loss), mesh, seen, *arguments())
    assert wanted == [("note", i) for i in range(4)]


def test_callbacks_in_while_loops_stay_where_they_are(mesh):
    seen = []

    def loss(params, i, xs, ys):
        def body(n):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return n + 1

        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        rounds = jax.lax.while_loop(lambda n: n < 2, body, jnp.int32(0))
        return squares(layer(params[1], h), ys[i]) * rounds

    assert_like_jit(mesh, by_index(loss), *arguments())
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(4)] * 2 * 2)  # here and under plain JAX


def test_groups_of_several_devices_call_once_with_the_whole_value():
    seen = []
    step = step_of(noting(seen, ordered=True))
    with mesh_of(2, data=2) as mesh:
        specs = (None, P(None, "data"), P(None, "data"))
        compiled = mpmd.jit(step, mesh, in_specs=specs)
        jax.block_until_ready(compiled(*arguments()))
    shapes = {name: value.shape for name, _, value in seen}
    assert len(seen) == 2 + 5 * 4
    assert shapes["first"] == batch()[0][0].shape


def test_a_function_without_a_loop(mesh):
    seen = []
    params, _ = mpmd.jit(sgd_step(mse, mpmd.Std1F1B(2)), mesh)(weights(2), *batch())

    def norm(params):
        total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        jax.debug.callback(lambda v: seen.append(float(v)), total)
        jax.debug.callback(lambda: seen.append("done"))
        return total

    total = mpmd.jit(norm, mesh)(params)
    assert float(total) == pytest.approx(seen[0])
    assert seen[1:] == ["done"]


def test_what_functions_are_called_with(mesh):
    """JAX arrays, keys as keys, Python values as they are."""
    seen = []

    def loss(params, i, xs, ys):
        key = jax.random.fold_in(jax.random.key(0), i)
        jax.debug.callback(lambda *a, **k: seen.append((a, k)), key, i, "text", flag=True, big=xs[i])
        io_callback(lambda v: seen.append(v), None, xs[i].astype(jnp.bfloat16))
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        return squares(layer(params[1], h), ys[i])

    float(mpmd.jit(by_index(loss), mesh)(*arguments())[1])
    assert len(seen) == 8
    (key, i, text), options = seen[2]
    assert_close(key, jax.random.fold_in(jax.random.key(0), 1))
    assert (int(i), text, options["flag"]) == (1, "text", True)
    assert isinstance(options["big"], jax.Array)
    assert seen[3].dtype == jnp.bfloat16


def test_prints_name_stage_and_microbatch(mesh, capfd):
    def tell(name, i, value):
        jax.debug.print(name + " of {i} {{as it is}}", i=i)

    float(mpmd.jit(step_of(tell), mesh)(*arguments())[1])
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == [
        "before of -1 {as it is}",
        "[stage 0, microbatch 0] first of 0 {as it is}",
        "[stage 1, microbatch 0] mark of 0 {as it is}",
    ]
    assert "[stage 1, microbatch 3] loss of 3 {as it is}" in lines


def test_equal_stages_share_executables():
    def loss(params, x, y):
        h = x
        for stage, p in enumerate(params):
            h = layer(p, h)
            jax.debug.print("{} {}", stage, h[0, 0])
            h = mpmd.mark_stage_end(h) if stage < 3 else h
        return squares(h, y)

    plan = planned(sgd_step(loss, mpmd.Std1F1B(4)), weights(4), *batch(), groups=4).plan
    forwards = {
        run.executable for program in plan.programs[1:3] for run in program.runs if "fwd" in run.label
    }
    assert len(forwards) == 1
    tells = [i for i in plan.programs[1].instructions if isinstance(i, HostCall)]
    assert [str(tell.task) for tell in tells] == [f"fwd_1__{i}" for i in range(4)]
    made = {name for run in plan.programs[1].runs for name in run.outputs}
    assert all(set(tell.values) <= made for tell in tells)


def failing(name, microbatch, seen):
    def tell(at, i, value):
        def note(i):
            if (at, int(i)) == (name, microbatch):
                raise ValueError("enough")
            seen.append((at, int(i)))

        jax.debug.callback(note, i)

    return tell


def test_a_callback_that_raises(mesh):
    """Reading any result raises it; what comes before it in the step was called, what comes after was not."""
    seen = []
    compiled = mpmd.jit(step_of(failing("second", 1, seen)), mpmd_mesh=mesh)
    state, total = compiled(*arguments())
    with pytest.raises(
        CallbackError,
        match=r"debug_callback at .*test_callback_order\.py:\d+ .*"
        r"\[stage 1, microbatch 1\], raised ValueError: enough",
    ) as caught:
        float(total)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(CallbackError):
        jax.block_until_ready(state)
    assert seen[-1] == ("mark", 1)
    # The values are there, and so are those of the next step.
    seen.clear()
    with pytest.raises(CallbackError):
        float(compiled(state, *batch())[1])
    assert len(seen) == 8


def test_of_a_step_that_fails_all_that_was_told_is_called(mesh):
    seen = []

    def boom(value):
        if float(value) >= 2:
            raise ValueError("a fault of the user's")
        return value

    def loss(params, i, xs, ys):
        jax.debug.callback(lambda i: seen.append(("first", int(i))), i)
        h = mpmd.mark_stage_end(layer(params[0], xs[i]))
        h = h + 0 * jax.pure_callback(boom, jax.ShapeDtypeStruct((), jnp.float32), i.astype(jnp.float32))
        jax.debug.callback(lambda i, h: seen.append(("second", int(i))), i, h)
        return squares(layer(params[1], h), ys[i])

    total = mpmd.jit(by_index(loss, mpmd.GPipe(2)), mesh)(*arguments())[1]
    with pytest.raises(mpmd.TaskError, match="fwd_1__2 failed on group 1"):
        float(total)
    called = [entry for entry in seen if entry[1] < 2]
    assert called == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    assert not any(name == "second" and i >= 2 for name, i in seen)


def test_a_callback_may_read_results_and_may_not_run_steps(mesh):
    """Also results of its own step: what waits for its callbacks does not wait in one of them."""
    read, refused, results = [], [], []

    def note(i):
        read.append([float(total) for total in results])
        with pytest.raises(RuntimeError, match="a callback of a step cannot run a step") as caught:
            compiled(weights(2), *batch())
        refused.append(caught.value)

    def tell(name, i, value):
        if name == "after":
            jax.debug.callback(note, i)

    compiled = mpmd.jit(step_of(tell), mesh)
    state = weights(2)
    for _ in range(3):
        state, total = compiled(state, *batch())
        results.append(total)
    totals = [float(total) for total in results]
    assert len(read) == len(refused) == 3
    assert all(seen == totals[: len(seen)] for seen in read)

"""What cannot be done is refused in a few lines that say what, where, and what to do instead."""

import re

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import FromZeros, batch, layer, mlp, mse, planned, sgd_step, squares, stack, weights
from tests.support.programs.table import loop

HERE, MODELS, TABLE = r"test_errors\.py:\d+", r"models\.py:\d+", r"table\.py:\d+"
NO_SCHEDULE = r"must be a Schedule, such as mpmd.Std1F1B\(num_stages=4\)"


def of_loss(loss):
    return sgd_step(loss, mpmd.Std1F1B(2))


train = of_loss(mse)


def of_operation(operation):
    return lambda state, xs, ys: loop(lambda x, y: mse(state, x, y), (xs, ys), 2, operation)


def of_schedule(schedule, loss=mse):
    return lambda state, xs, ys: mpmd.treduce(
        lambda mb: loss(state, *mb), (xs, ys), schedule=schedule, operation=mpmd.Add
    )


def too_many_marks(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x), name="embed")
    h = mpmd.mark_stage_end(jnp.sin(h), name="middle")
    h = mpmd.mark_stage_end(layer(params[1], h))
    return squares(h, y)


def marks_in_a_map(params, x, y):
    return jnp.mean(jax.lax.map(lambda row: layer(params[1], mpmd.mark_stage_end(layer(params[0], row))), x))


def stacked(params, layers=2):
    return stack(params * (layers // 2))


def scan_of(layers=2, **spread):
    """A loss that scans over ``layers`` layers, with a mark in the body."""

    def loss(params, x, y):
        def body(h, p):
            return mpmd.mark_stage_end(layer(p, h), **spread), None

        return jnp.mean(jax.lax.scan(body, x, stacked(params, layers))[0])

    return loss


def layers_of_unequal_sizes(params, x, y):
    xs = params[0]["w"], params[0]["b"][:3]
    return jnp.mean(jax.lax.scan(lambda h, p: (mpmd.mark_stage_end(h * p[0] + p[1]), None), x, xs)[0])


def more_iterations_than_layers(params, x, y):
    def body(h, p):
        return mpmd.mark_stage_end(h + p), None

    return jnp.mean(jax.lax.scan(body, x, params[0]["w"], length=3)[0])


def two_marks_in_a_scan(params, x, y):
    def body(h, p):
        h = mpmd.mark_stage_end(jnp.sin(h))
        return mpmd.mark_stage_end(layer(p, h)), None

    return jnp.mean(jax.lax.scan(body, x, stacked(params))[0])


def a_mark_of_what_is_not_carried(params, x, y):
    def body(h, p):
        return layer(p, h), mpmd.mark_stage_end(jnp.mean(h))

    return jnp.mean(jax.lax.scan(body, x, stacked(params))[1])


def a_mark_in_the_inner_scan(params, x, y):
    def block(h, p):
        return jax.lax.scan(lambda h, _: (mpmd.mark_stage_end(layer(p, h)), None), h, None, length=2)

    return jnp.mean(jax.lax.scan(block, x, stacked(params))[0])


def a_mark_in_a_cond_in_a_scan(params, x, y):
    def body(h, p):
        return jax.lax.cond(h[0, 0] > 0, lambda h: mpmd.mark_stage_end(layer(p, h)), lambda h: h, h), None

    return jnp.mean(jax.lax.scan(body, x, stacked(params))[0])


def every_outside_of_a_scan(params, x, y):
    h = x
    for p in params:
        h = mpmd.mark_stage_end(layer(p, h), every=1)
    return jnp.mean(h)


def marks_in_a_switch(params, x, y):
    branches = [lambda h: mpmd.mark_stage_end(layer(params[0], h)), lambda h: layer(params[1], h)]
    return jnp.mean(jax.lax.switch(jnp.int32(x[0, 0] > 0), branches, x))


def marks_in_a_while_loop(params, x, y):
    def body(h):
        return mpmd.mark_stage_end(layer(params[0], h))

    return jnp.mean(
        jax.lax.stop_gradient(jax.lax.while_loop(lambda h: h[0, 0] > 2, body, x)) * params[0]["w"]
    )


def a_mark_of_nothing(params, x, y):
    return mpmd.mark_stage_end(1.0) * mse(params, x, y)


def loop_in_scan(state, xs, ys):
    return jax.lax.scan(lambda state, _: train(state, xs, ys), state, None, length=2)


def loop_in_cond(state, xs, ys):
    return jax.lax.cond(xs[0, 0, 0] > 0, lambda: train(state, xs, ys), lambda: (state, 0.0))


def loop_in_a_loop(state, xs, ys):
    return loop(lambda x, y: train(state, x[None], y[None])[1], (xs, ys), 2)


def gradient_of_a_loop(state, xs, ys):
    return jax.grad(lambda state: loop(lambda x, y: mse(state, x, y), (xs, ys), 2))(state)


def steps_in_a_while_loop(state, xs, ys):
    return jax.lax.while_loop(
        lambda state: jnp.sum(state[0]["b"]) > 0, lambda state: train(state, xs, ys)[0], state
    )


def loops_of_unlike_meshes(state, xs, ys):
    state, _ = train(state, xs, ys)
    return of_schedule(mpmd.GPipe(3), too_many_marks)(state, xs, ys)


def loops_with_wrong_marks(state, xs, ys):
    """Both have too few."""
    first = of_schedule(mpmd.Std1F1B(3))(state, xs, ys)
    return first + of_schedule(mpmd.Std1F1B(2), lambda p, x, y: jnp.mean(layer(p[0], x)))(state, xs, ys)


def network_called_again_and_again(params, x, y):
    return jnp.mean(jax.lax.fori_loop(0, 2, lambda i, h: h + scan_of(2)(params, h, y), x))


def a_loop_whose_result_is_not_used(state, xs, ys):
    train(state, xs, ys)
    return state, xs.sum()


class ChangesShape(FromZeros):
    def update(self, state, update, index):
        return jnp.stack([state, update])


class PrintsItsState(ChangesShape):
    def update(self, state, update, index):
        jax.debug.print("{}", state)
        return state + update


REFUSED = {
    "too many marks": (
        of_loss(too_many_marks),
        [
            r"has 3 calls of mark_stage_end, which end 3 stages, but the schedule Std1F1B\(num_stages=2\)",
            "it needs 1 mark, or 2 with one after the last stage",
            r"on 2 groups, as where calls .* use Interleaved1F1B\(num_stages=4, mpmd_dim=2\)",
            rf"stage 0 ends at \S*{HERE} .*'embed'",
            rf"stage 1 ends at \S*{HERE} .*'middle'",
            rf"stage 2 ends at \S*{HERE}",
        ],
    ),
    "calls that feed one another": (
        of_schedule(mpmd.ForwardOnly(2, 2), lambda p, x, y: jnp.mean(mlp(p, mlp(p, mlp(p, x))))),
        [r"has 3 calls .* on 2 groups, .* use ForwardOnly\(num_stages=4, mpmd_dim=2\)"],
    ),
    "calls whose stages do not divide": (
        of_schedule(mpmd.Std1F1B(3), lambda p, x, y: jnp.mean(mlp([*p, p[0]], mlp([*p, p[0]], x)))),
        [r"has 4 calls .* on 3 groups, .* use ListSchedule\(num_stages=5, mpmd_dim=3\)"],
    ),
    "no marks": (
        of_loss(lambda p, x, y: jnp.mean(layer(p[0], x))),
        ["has no call of mark_stage_end whose result it uses", "it needs 1 mark"],
    ),
    "every that does not divide": (
        of_loss(scan_of(8, every=3)),
        [HERE, r"every=3 does not divide", r"every=\(4, 4\), or num_stages=2"],
    ),
    "iterations that do not add up": (
        of_loss(scan_of(8, every=(3, 4))),
        [HERE, r"a scan of 8 iterations, but every=\(3, 4\) has 7", "which add up to 8"],
    ),
    "more stages than layers": (
        of_loss(scan_of(2, num_stages=4)),
        [HERE, "2 iterations, which cannot be divided into num_stages=4"],
    ),
    "a leaf of fewer layers than the others": (
        of_loss(layers_of_unequal_sizes),
        [
            HERE,
            "different leading axis sizes: ",
            r"the first axis has 4 in args\[0\]\[0\]\['b'\], ",
            "once for each layer",
        ],
    ),
    "another length than layers": (
        of_loss(more_iterations_than_layers),
        [
            HERE,
            "`length` argument of 3 which disagrees",
            "the first axis has 4 in args",
            "all layers share from outside",
        ],
    ),
    "stages of a scan that the schedule has not": (
        of_loss(scan_of(6, every=2)),
        [
            HERE,
            "has marks that end 3 stages",
            r"\(\.\.\., num_stages=2\) in the scan",
            "stages 0 to 2 end at",
        ],
    ),
    "two marks in a scan": (
        of_loss(two_marks_in_a_scan),
        [HERE, "several marks in its body", "a stage ends after a whole iteration"],
    ),
    "a mark of what is not carried": (
        of_loss(a_mark_of_what_is_not_carried),
        [HERE, "does not carry what it returns", "return it as the carry"],
    ),
    "inner scan": (of_loss(a_mark_in_the_inner_scan), [HERE, "inside a scan within a scan", "outer one"]),
    "cond in a scan": (of_loss(a_mark_in_a_cond_in_a_scan), [HERE, r"inside a lax\.cond or lax\.switch"]),
    "every without a scan": (
        of_loss(every_outside_of_a_scan),
        [HERE, "not in the body of a lax.scan: leave out every and num_stages"],
    ),
    "map": (of_loss(marks_in_a_map), [HERE, "carries nothing, such as jax.lax.map", "call jax.vmap instead"]),
    "switch": (
        of_loss(marks_in_a_switch),
        [HERE, r"inside a lax\.cond or lax\.switch; put the mark outside"],
    ),
    "while": (of_loss(marks_in_a_while_loop), [HERE, "inside a while loop; put the mark outside"]),
    "nothing marked": (
        of_loss(a_mark_of_nothing),
        [r"mark_stage_end needs a pytree with at least one array as x, got 1\.0"],
    ),
    "loop in scan": (
        loop_in_scan,
        [
            rf"the treduce at \S*{MODELS} .* is inside scan; call it directly in the step",
            rf"not in the scan at \S*{HERE} .*Write a Python loop of steps",
        ],
    ),
    "steps in a while loop": (steps_in_a_while_loop, ["is inside while", "Write a Python loop of steps"]),
    "a step under checkpoint": (
        jax.checkpoint(train),
        ["is inside jax.checkpoint", "Put jax.checkpoint around layers, or around the loss"],
    ),
    "gradient of a step under checkpoint": (
        jax.grad(jax.checkpoint(lambda *args: train(*args)[1])),
        ["is differentiated, .* call jax.grad inside the function"],
    ),
    "loop in cond": (loop_in_cond, [HERE, "the treduce at .* is inside cond; call it directly in the step"]),
    "loop in a loop": (loop_in_a_loop, ["a treduce within a treduce; only the outer loop can be pipelined"]),
    "network called again and again": (
        of_loss(network_called_again_and_again),
        [HERE, "inside a scan within a scan: .* write the outer one as a Python loop"],
    ),
    "gradient of a loop": (
        gradient_of_a_loop,
        [rf"the treduce at \S*{TABLE} .* is differentiated", "inside the function"],
    ),
    "loops of unlike meshes": (
        loops_of_unlike_meshes,
        [
            rf"GPipe\(num_stages=3\) of treduce at \S*{HERE} .* runs on 3 groups, but the mesh has 2",
            rf"all loops run on the same groups \(other loops take 2 at \S*{MODELS}",
        ],
    ),
    "wrong marks in two loops": (
        loops_with_wrong_marks,
        [
            rf"treduce at \S*{HERE} .* has 1 call .* 3 stages",
            rf"treduce at \S*{HERE} .* has no call .* 2 stages",
        ],
    ),
    "unused loop": (a_loop_whose_result_is_not_used, ["no result of the step depends on its treduce"]),
    "an operation's class": (
        of_operation(mpmd.Concat),
        [r"must be an operation, such as .*Concat\(axis=0\)"],
    ),
    "an operation's name": (
        of_operation("sum"),
        ["must be an operation, such as mpmd.Mean, .* with the methods state and update, not 'sum'"],
    ),
    "operations that do not fit": (
        of_operation((mpmd.Add, mpmd.Add)),
        ["not a pytree prefix of the loop's result"],
    ),
    "an operation that changes shape": (
        of_operation(ChangesShape()),
        [r"returned float32\[2\] for a state of float32\[\]; it must keep the state's shape and dtype"],
    ),
    "a callback on an operation's state": (
        of_operation(PrintsItsState()),
        [rf"debug_\w+ at \S*{HERE}", "reads the state of an operation; call it in the function"],
    ),
    "a schedule's name": (of_schedule("1f1b"), [NO_SCHEDULE, "'1f1b'"]),
    "a schedule's class": (of_schedule(mpmd.Std1F1B), [NO_SCHEDULE]),
}


@pytest.mark.parametrize(("step", "said"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:mark_stage_end:mpmd.errors.SharedWeightsWarning")
def test_refused(mesh, step, said):
    with pytest.raises((mpmd.CompileError, TypeError)) as caught:
        mpmd.jit(step, mesh)(weights(2), *batch())
    message = str(caught.value)
    for expected in said:
        assert re.search(expected, message), f"{expected!r} is not in: {message}"
    assert len(message) < 1000, message
    assert "lambda ;" not in message and "let" not in message.split(), f"prints a jaxpr: {message}"


@pytest.mark.parametrize("step", [of_loss(two_marks_in_a_scan), gradient_of_a_loop])
def test_what_is_wrong_in_a_forward_is_not_said_again_of_its_backward(step):
    with pytest.raises(mpmd.CompileError) as caught:
        planned(step, weights(2), *batch())
    assert len(caught.value.faults) == 1


def missing(params, x, y):
    return {}["mine"]


def branches_on_a_tracer(params, x, y):
    return mse(params, x, y) if x[0, 0] > 0 else 0.0


@pytest.mark.parametrize(
    ("loss", "error"),
    [(missing, KeyError), (branches_on_a_tracer, jax.errors.TracerBoolConversionError)],
)
def test_what_the_users_code_raises_stays_as_it_is(loss, error):
    with pytest.raises(error) as caught:
        planned(of_loss(loss), weights(2), *batch())
    assert __file__ in {str(entry.path) for entry in caught.traceback}

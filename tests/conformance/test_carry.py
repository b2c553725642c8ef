"""A carry means what lax.scan means by it, or is refused; see also the programs that carry something."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.compiler.split.test_split_backwards import Descending
from tests.support.models import batch, descend, planned, squares, weights
from tests.support.parity import assert_close, assert_parity, mesh_of
from tests.support.programs.carried import batch_norm, case, running_norm, statistics, through, with_gradients


def test_under_plain_jax_it_is_that_of_a_scan():
    loss, (xs, ys) = through(batch_norm, 2), batch(4)
    trained = case(loss, weights(2), statistics(2), mpmd.Std1F1B(2))
    params, carry = trained.state
    one = with_gradients(loss, params)
    carry, (losses, grads) = jax.jit(lambda carry: jax.lax.scan(one, carry, (xs, ys)))(carry)
    expected = (descend(params, jax.tree.map(lambda g: g.sum(0), grads)), carry), losses.sum()
    assert_close(jax.jit(trained.step)(trained.state, xs, ys), expected)


def test_a_loop_without_gradients():
    def step(state, xs, ys):
        params, carry = state

        def of_microbatch(carry, microbatch):
            before = carry[1]["var"]  # what is carried may be a result, too
            value, carry = through(running_norm, 2)(params, carry, *microbatch)
            return carry, (value, before, carry[0]["mean"])

        carry, results = mpmd.treduce(
            of_microbatch,
            (xs, ys),
            schedule=mpmd.ForwardOnly(2, 2),
            operation=(mpmd.Concat(), mpmd.Add, mpmd.Concat()),
            carry=carry,
        )
        return (params, carry), results

    assert_parity(step, (weights(2), statistics(2)), *batch(), mesh=mesh_of(2))


def test_a_forward_reads_what_the_one_before_it_made():
    """So every reader of the plan has the microbatches of a stage in their order."""
    trained = case(through(batch_norm, 2), weights(2), statistics(2), mpmd.GPipe(2))
    plan = planned(trained.step, trained.state, *batch(4)).plan
    runs = {str(run.task): run for run in plan.programs[0].runs}
    for microbatch in range(1, 4):
        handed = set(runs[f"fwd_0__{microbatch - 1}"].outputs) & set(runs[f"fwd_0__{microbatch}"].inputs)
        assert len(handed) == 2


def refused(loss, schedule=None):
    trained = case(loss, weights(2), statistics(2), schedule or mpmd.Std1F1B(2))
    with pytest.raises(mpmd.CompileError) as caught:
        planned(trained.step, trained.state, *batch(4))
    return str(caught.value)


def test_a_schedule_in_another_order_is_refused():
    message = refused(through(batch_norm, 2), Descending(2, 2))
    assert "Descending" in message and "runs fwd_0__3 before fwd_0__2" in message and "carried" in message


def test_a_value_that_a_later_stage_updates_is_refused():
    def loss(params, carry, x, y):
        h = mpmd.mark_stage_end(jnp.tanh(x @ params[0]["w"] + carry[0]["mean"]))
        h = jnp.tanh(h @ params[1]["w"])
        return squares(h, y), [carry[0] | {"mean": h.mean(0)}, carry[1]]

    message = refused(loss)
    assert "reads, in fwd_0, a value that treduce carries" in message and "and fwd_1 updates it" in message
    assert message.count("test_carry.py") == 2


@jax.custom_vjp
def scaled(h, scale):
    """The identity, whose gradient is scaled."""
    return h


scaled.defvjp(lambda h, scale: (h, scale), lambda scale, g: (g * scale, jnp.zeros_like(scale)))


def test_a_backward_in_halves_that_both_read_a_carried_value_is_refused():
    """The gradient of a stage's input needs what the gradient of its weights updates."""

    def step(state, xs, ys):
        params, scale = state

        def of_microbatch(scale, microbatch):
            def loss(params):
                x, y = microbatch
                h = mpmd.mark_stage_end(jnp.tanh(x @ params[0]["w"]))
                return squares(scaled(h, scale) @ params[1]["w"], y)

            value, grads = jax.value_and_grad(loss)(params)
            return scale + jnp.sum(grads[1]["w"] ** 2), (value, grads)

        scale, results = mpmd.treduce(of_microbatch, (xs, ys), schedule=mpmd.ZeroBubble(2), carry=scale)
        return (params, scale), results

    with pytest.raises(mpmd.CompileError, match=r"ZeroBubble.* splits backwards"):
        planned(step, (weights(2), jnp.float32(1)), *batch(4))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda carry, x: carry, "returns a pair, the next carry and the result of the microbatch"),
        (lambda carry, x: ((carry, carry), x), "takes a carry of the structure"),
        (lambda carry, x: (carry[None], x), r"carry is float32\[4\], but .* returns float32\[1, 4\] for it"),
        (lambda carry, x: (carry.astype(jnp.float16), x), r"returns float16\[4\] for it"),
    ],
)
def test_functions_that_return_another_carry(function, message):
    with pytest.raises(TypeError, match=message):
        mpmd.treduce(function, batch(4)[0], mpmd.Std1F1B(1), operation=mpmd.Add, carry=jnp.zeros(4))

"""What a step returns besides the state, and how the loop accumulates it."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from tests.support.models import batch, layer, mse, weights
from tests.support.programs.auxiliary_outputs import Initial, Last, with_aux
from tests.support.programs.table import Case, descend, program, trains


@program()
def literal_constant_duplicated_and_forwarded_outputs():
    constant = np.arange(3.0, dtype="float32")

    def step(state, xs, ys):
        params, extra, unused = state
        total, grads = trains(params, (xs, ys))
        params = descend(params, grads)
        outputs = (
            total,
            total,
            1.5,
            7,
            True,
            jnp.int32(3),
            constant,
            jnp.zeros(2),
            extra,
            xs,
            params[0]["w"],
        )
        return (params, extra, unused + 1), outputs

    return Case(step, (weights(3), jnp.arange(6.0), jnp.int32(0)), batch())


@program()
def a_result_used_twice_by_the_state():
    """Both copies are fed back: a target network that is set to the trained one."""

    def step(state, xs, ys):
        params, target = state

        def loss(params, x, y):
            return mse(params, x, y) + 0.1 * mlp_without_marks(target, x).mean()

        total, grads = trains(params, (xs, ys), loss)
        new = descend(params, grads)
        return (new, new), total

    return Case(step, (weights(3), weights(3)), batch())


def mlp_without_marks(params, h):
    for stage in params:
        h = layer(stage, h)
    return h


@program()
def none_and_empty_outputs():
    def step(state, xs, ys):
        params, nothing = state
        total, grads = trains(params, (xs, ys))
        return (descend(params, grads), nothing), {"loss": total, "none": None, "empty": [], "also": ((), {})}

    return Case(step, (weights(3), None), batch())


@program()
def the_loss_alone():
    """Of a backward that nobody asks for nothing is left."""

    def step(state, params, xs, ys):
        return state, trains(params, (xs, ys))[0]

    def holds(loaded):
        assert "bwd" not in str(loaded.plan)

    return Case(step, (), (weights(3), *batch()), holds=holds)


@program()
def gradients_of_some_stages_are_dropped():
    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        return [*state[:2], descend(state[2], grads[2])], total

    return Case(step, weights(3), batch())


@program()
def results_of_the_loop_that_no_stage_makes():
    """Statistics of the inputs, the index, constants."""

    def step(state, xs, ys):
        def run(i):
            loss, grads = jax.value_and_grad(mse)(state, xs[i], ys[i])
            return loss, grads, i, jnp.max(xs[i]), jnp.float32(2.0), jnp.arange(3) * i

        operation = (mpmd.Add, mpmd.Add, mpmd.Concat(), mpmd.Max, mpmd.Add, mpmd.Add)
        total, grads, *rest = mpmd.treduce_i(run, len(xs), mpmd.Std1F1B(3), operation)
        return descend(state, grads), (total, rest)

    return Case(step, weights(3), batch())


@program({"Add": mpmd.Add, "Max": mpmd.Max, "Concat": mpmd.Concat(), "Last": Last()})
def an_array_closed_over_that_is_only_an_output(operation):
    table = np.arange(3, dtype=np.float32)

    def loss(params, x, y):
        return mse(params, x, y), table

    return with_aux(loss, operation)


@program()
def a_state_that_is_never_updated():
    return with_aux(lambda params, x, y: (mse(params, x, y), jnp.sum(x)), Initial())

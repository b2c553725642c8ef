"""Steps with several loops, each with a schedule of its own, in the order of their data."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import (
    WIDTH,
    batch,
    descend,
    init,
    keys,
    mlp,
    mse,
    squares,
    unmarked,
    weights,
)
from tests.support.programs.passes import stays_on_one_group_each
from tests.support.programs.scanned_layers import model, stacked
from tests.support.programs.table import Case, program

ADAM = optax.adam(1e-2, eps=1e-3)


def gradients(loss, params, data, schedule):
    """The means of loss and gradients."""
    return mpmd.treduce(
        lambda mb: jax.value_and_grad(loss)(params, *mb), data, schedule=schedule, operation=mpmd.Mean
    )


def updated(params, moments, grads, optimizer=ADAM):
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


def microbatches(arrays, count):
    """Arrays of microbatches as others of as many microbatches."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[2:]), arrays)


@program()
def a_compiled_epoch_that_is_called_twice():
    """JAX has one trace of both loops."""

    @jax.jit
    def epoch(state, xs, ys):
        params, moments = state
        total, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(3))
        return updated(params, moments, grads), total

    def step(state, xs, ys):
        state, first = epoch(state, xs, ys)
        state, last = epoch(state, ys, xs)
        return state, (first, last)

    return Case(step, init(weights(3), ADAM), batch(), steps=3, holds=stays_on_one_group_each)


@program()
def distillation():
    """The first loop stacks what a frozen teacher says, without gradients; the student's reads it."""

    def step(state, teacher, xs):
        student, moments = state
        targets = mpmd.treduce(
            lambda x: jax.nn.softmax(mlp(teacher, x)), xs, mpmd.ForwardOnly(3, 3), operation=mpmd.Concat()
        )

        def loss(student, x, target):
            return optax.softmax_cross_entropy(mlp(student, x), target).mean()

        total, grads = gradients(loss, student, (xs, targets), mpmd.Std1F1B(3))
        return updated(student, moments, grads), (total, targets.sum(0))

    def holds(loaded):
        stays_on_one_group_each(loaded)
        # The last stage of either loop is on one group, and so the targets stay there.
        sent = [value.aval.shape for edge in mpmd.explain(loaded).edges for value in edge.values]
        assert (4, 4, 4) not in sent

    return Case(step, init(weights(3), ADAM), (weights(4)[1:], batch()[0]), steps=3, holds=holds)


@program()
def loops_that_cut_one_stack_otherwise():
    """Three stages of two layers, and two of three: the parts are those of both."""

    def step(state, xs, ys):
        one, grads = gradients(model(every=2), state, (xs, ys), mpmd.Std1F1B(3))
        state = descend(state, grads)
        two, grads = gradients(model(every=3), state, (xs, ys), mpmd.GPipe(2))
        return descend(state, grads), (one, two)

    return Case(step, stacked(), batch(), steps=3)


@program()
def the_second_loop_depends_on_a_norm_of_all_gradients():
    """As a line search: the step that is taken depends on a loss after a trial step."""

    def step(params, xs, ys):
        before, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(3))
        norm = optax.tree.norm(grads)
        trial = jax.tree.map(lambda p, g: p - 0.5 * g / (norm + 1e-3), params, grads)
        after = mpmd.treduce(
            lambda mb: mse(trial, *mb), (xs, ys), schedule=mpmd.ForwardOnly(3, 3), operation=mpmd.Mean
        )
        better = after < before
        new = jax.tree.map(lambda p, t: jnp.where(better, t, p), params, trial)
        return new, (before, after, norm)

    return Case(step, weights(3), batch(), steps=3)


@program()
def prints_in_both_loops_and_between():
    """Callbacks keep their order; see also the tests of callbacks."""

    def step(params, xs, ys):
        one, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(3))
        jax.debug.callback(lambda _: None, one)
        params = descend(params, grads)
        two, grads = gradients(mse, params, (xs, ys), mpmd.GPipe(3))
        return descend(params, grads), (one, two)

    return Case(step, weights(3), batch())


@program()
def a_loop_that_no_result_needs():
    """It is dead code beside another loop."""

    def step(params, xs, ys):
        gradients(mse, params, (ys, xs), mpmd.GPipe(3))
        total, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(3))
        return descend(params, grads), total

    def holds(loaded):
        assert [loop.schedule for loop in loaded.plan.loops] == ["Std1F1B"]

    return Case(step, weights(3), batch(), holds=holds)


def delayed_actor(differentiate):
    """A step of two critics and an actor, updated with the targets in every second step: TD3.

    Args:
      differentiate: ``value_and_grad`` of a loss of weights, then constants and, last, a batch.
    """

    def critic_loss(critic, batch):
        guess = mlp(critic, jnp.concatenate([batch["seen"], batch["done"]], -1))
        return squares(guess, batch["target"])

    def actor_loss(actor, critic, batch):
        action = jnp.tanh(mlp(actor, batch["seen"]))
        return -jnp.mean(unmarked(critic, jnp.concatenate([batch["seen"], action], -1)))

    def step(state, batch):
        trained, moments, followers, count = state
        action = jnp.tanh(unmarked(followers["actor"], batch["seen"]))
        critics = ("first", "second")
        values = [unmarked(followers[name], jnp.concatenate([batch["seen"], action], -1)) for name in critics]
        batch = {**batch, "target": batch["reward"] + 0.9 * jnp.minimum(*values)}
        new, new_moments, losses = dict(trained), dict(moments), {}
        for name in critics:
            losses[name], grads = differentiate(critic_loss)(trained[name], batch)
            new[name], new_moments[name] = updated(trained[name], moments[name], grads)
        losses["actor"], grads = differentiate(actor_loss)(trained["actor"], new["first"], batch)

        def with_actor():
            actor, its_moments = updated(trained["actor"], moments["actor"], grads)
            return actor, its_moments, optax.incremental_update({**new, "actor": actor}, followers, 0.1)

        def without_actor():
            return trained["actor"], moments["actor"], followers

        new["actor"], new_moments["actor"], followers = jax.lax.cond(
            count % 2 == 0, with_actor, without_actor
        )
        return (new, new_moments, followers, count + 1), losses

    return step


def delayed_actor_arguments(stages=1):
    """The state and the batch."""
    half = WIDTH // 2
    rows = jax.random.normal(keys(1)[0], (16, half))

    def network(number, inputs, outputs):
        params = weights(stages)
        params[0] = {**params[0], "w": params[0]["w"][:inputs] + 0.1 * number}
        return [*params[:-1], {"w": params[-1]["w"][:, :outputs], "b": params[-1]["b"][:outputs]}]

    trained = {"first": network(1, WIDTH, 1), "second": network(2, WIDTH, 1), "actor": network(3, half, half)}
    moments = {name: ADAM.init(params) for name, params in trained.items()}
    batch = {"seen": rows, "done": jnp.sin(9 * rows), "reward": rows[:, :1]}
    return (trained, moments, jax.tree.map(jnp.copy, trained), jnp.int32(0)), batch


@program({"one stage": 1, "two stages": 2})
def losses_of_two_critics_and_an_actor(stages):
    """In loops of one stage, too, what is made of constants has its place."""

    def differentiate(loss):
        def of_batch(*args):
            run = mpmd.value_and_grad(
                loss, num_microbatches=4, schedule=mpmd.Std1F1B(stages), batch_argnums=len(args) - 1
            )
            return run(*args)

        return of_batch

    state, rows = delayed_actor_arguments(stages)
    return Case(delayed_actor(differentiate), state, (rows,), stages, steps=3)

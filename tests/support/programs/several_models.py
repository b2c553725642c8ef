"""Several models, or one that is passed twice: each has marks of its own, and all pass the same stages."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import mpmd
from tests.support.models import WIDTH, batch, keys, mlp, mse, weights
from tests.support.programs.table import Case, descend, loop, program, train

ACTIONS = 3


@program(usual=True)
def a_teacher_with_a_centre_that_follows_the_student():
    """As in self-distillation: the teacher sees another view, and has no gradient."""

    def step(state, xs, ys):
        student, teacher, centre = state

        def loss(student, x, y):
            target = jax.nn.softmax((mlp(teacher, y) - centre) / 0.5)
            target = jax.lax.stop_gradient(target)
            return optax.softmax_cross_entropy(mlp(student, x), target).mean(), target.mean(0)

        (total, seen), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(student, x, y), (xs, ys), operation=mpmd.Mean
        )
        student = descend(student, grads)
        teacher = optax.incremental_update(student, teacher, 0.1)
        return (student, teacher, 0.9 * centre + 0.1 * seen), (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0]")]
        assert homes[:-1] == [(0,), (0,), (1,), (1,), (2,), (2,)] * 2 and homes[-1] == (2,)

    state = weights(3), weights(3)[::-1], jnp.zeros(WIDTH)
    return Case(step, state, batch(), steps=3, holds=holds)


@program()
def one_model_that_is_passed_for_two_views():
    def loss(params, x, y):
        return mse(params, x, y) + jnp.mean((mlp(params, x) - mlp(params, x + 0.1)) ** 2)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0]")]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)]

    return train(loss, weights(3), holds=holds)


@program()
def models_that_share_a_compiled_function():
    """The marks of all calls come from one trace of it."""
    apply = jax.jit(mlp)

    def loss(params, x, y):
        policy, reference = params
        mine, other = apply(policy, x), jax.lax.stop_gradient(apply(reference, x))
        return jnp.mean((mine - y) ** 2) + 0.1 * jnp.mean((mine - other) ** 2) + mse(reference, y, x)

    return train(loss, (weights(3), weights(3)[::-1]))


class ActorCritic(nn.Module):
    """Two networks, each with marks of its own: both pass the same stages."""

    @nn.compact
    def __call__(self, x):
        def marked(h, layer):
            return mpmd.mark_stage_end(h) if layer < 1 else h

        actor = critic = x
        for i in range(2):
            actor = marked(nn.tanh(nn.Dense(WIDTH, kernel_init=nn.initializers.orthogonal())(actor)), i)
        logits = nn.Dense(ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        for i in range(2):
            critic = marked(nn.tanh(nn.Dense(WIDTH, kernel_init=nn.initializers.orthogonal())(critic)), i)
        return logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(critic)[..., 0]


def advantages_of(rewards, values, dones, discount=0.99, decay=0.95):
    """Generalised advantage estimates, by a scan backwards in time. All are (time, environments)."""

    def backwards(carry, transition):
        advantage, following = carry
        reward, value, done = transition
        delta = reward + discount * following * (1 - done) - value
        advantage = delta + discount * decay * (1 - done) * advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(values[-1]), values[-1]
    return jax.lax.scan(backwards, start, (rewards, values, dones), reverse=True)[1]


@program(usual=True)
def proximal_policy_optimization():
    """Each step is an epoch over the same rollouts: advantages, a shuffle, a clipped objective."""
    model = ActorCritic()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))

    def step(train_state, rollouts):
        state, key = train_state
        key, order = jax.random.split(key)
        advantages = advantages_of(rollouts["reward"], rollouts["value"], rollouts["done"])
        batch = {**rollouts, "advantage": advantages, "target": advantages + rollouts["value"]}
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        permutation = jax.random.permutation(order, len(batch["reward"]))
        batch = jax.tree.map(lambda x: x[permutation], batch)

        def loss(params, batch):
            logits, value = state.apply_fn(params, batch["observation"])
            log_probabilities = jax.nn.log_softmax(logits)
            chosen = jnp.take_along_axis(log_probabilities, batch["action"][:, None], -1)[:, 0]
            near = batch["value"] + jnp.clip(value - batch["value"], -0.2, 0.2)
            errors = jnp.maximum((value - batch["target"]) ** 2, (near - batch["target"]) ** 2)
            ratio = jnp.exp(chosen - batch["log_probability"])
            gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-2)
            actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
            entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, -1).mean()
            return actor + 0.25 * errors.mean() - 0.01 * entropy, (actor, errors.mean(), entropy)

        (total, parts), grads = mpmd.treduce(
            lambda batch: jax.value_and_grad(loss, has_aux=True)(state.params, batch),
            mpmd.microbatches(batch, 4),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Mean,
        )
        return (state.apply_gradients(grads=grads), key), (total, parts)

    time, environments = 8, 2
    draw = functools.partial(jax.random.normal, shape=(time, environments))
    observation, action, value, reward, done = keys(5)
    rollouts = {
        "observation": jax.random.normal(observation, (time, environments, WIDTH)),
        "action": jax.random.randint(action, (time, environments), 0, ACTIONS),
        "log_probability": jnp.full((time, environments), -jnp.log(ACTIONS)),
        "value": draw(value),
        "reward": draw(reward),
        "done": jnp.float32(draw(done) > 1),
    }
    params = jax.jit(model.init)(keys(1)[0], rollouts["observation"][0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    return Case(step, (state, keys(2)[1]), (rollouts,), 2, steps=3)

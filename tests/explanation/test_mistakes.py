"""Steps that compute the right numbers, but not what their user had in mind: each kind is a warning."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd import errors
from mpmd.explanation import warn_of_undonated_state
from mpmd.memory import GroupMemory, MemoryParts
from mpmd.runtime import worker
from tests.support.models import batch, layer, mse, planned, sgd_step, weights

TRAIN = sgd_step(mse, mpmd.Std1F1B(2))


def loop(fun, operation=mpmd.Add, microbatches=4, carry=None):
    """A step that is one loop of a function of parameters and a microbatch."""

    def step(params, *arrays):
        return mpmd.treduce(
            lambda *taken: fun(params, *taken[:-1], *taken[-1]),
            tuple(x[:microbatches] for x in arrays),
            schedule=mpmd.Std1F1B(2),
            operation=operation,
            carry=carry,
        )

    return step


def warned(step, *args, groups=2):
    """The warnings of compiling a step: their categories and texts. They are at the line that compiles it."""
    mesh = mpmd.AbstractMpmdMesh({"stage": groups}, "stage")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpmd.jit(step, mesh).lower(*args)
    assert all(warning.filename == __file__ for warning in caught)
    return [(warning.category, str(warning.message)) for warning in caught]


# A microbatch that is not read.


def test_a_loop_over_the_whole_batch_is_a_warning():
    xs, ys = batch()

    def step(params):
        whole = xs.reshape(-1, xs.shape[-1]), ys.reshape(-1, ys.shape[-1])
        return mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(params, *whole), (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Mean
        )

    ((category, text),) = warned(step, weights(2))
    assert category is errors.UnreadMicrobatchWarning
    assert "does not read its microbatch: it computes the same in each of the 4" in text
    assert f"{__file__}:" in text
    assert text.endswith("it reads a constant array (float32[4,4,4]), a constant array (float32[4,4,4])")


def test_a_loop_of_a_constant_loss_has_no_warning():
    def step(params):
        def loss(params, x, y):
            mpmd.mark_stage_end(x)
            return 1.0

        return mpmd.value_and_grad(loss, num_microbatches=4, schedule=mpmd.Std1F1B(2))(params, *batch())

    assert not warned(step, weights(2))


def test_the_warning_names_the_arguments_that_the_loop_reads():
    def step(state, batch):
        params = state["params"]
        grads = mpmd.treduce(
            lambda mb: jax.grad(mse)(params, batch["x"].astype(jnp.float32), batch["y"]),
            mpmd.microbatches((batch["x"], batch["y"]), 4),
            mpmd.Std1F1B(2),
            operation=mpmd.Mean,
        )
        return {"params": jax.tree.map(lambda p, g: p - g, params, grads)}

    xs, ys = (rows.reshape(-1, rows.shape[-1]) for rows in batch())
    ((_, text),) = warned(step, {"params": weights(2)}, {"x": xs, "y": ys})
    assert text.endswith("it reads args[1]['x'] (float32[16,4]), args[1]['y'] (float32[16,4])")


def test_it_is_one_however_results_are_combined():
    xs, ys = batch()
    fun = lambda params, x, y: jax.value_and_grad(mse)(params, xs[0], ys[0])  # noqa: E731
    (category, _), *others = warned(loop(fun, (mpmd.Concat(), mpmd.Add)), weights(2), xs, ys)
    assert category is errors.UnreadMicrobatchWarning and not others


def gradients(params, x, y):
    return jax.value_and_grad(mse)(params, x, y)


def counted(params, x, y):
    """A loss of each microbatch, and a count that is the same for all."""
    return mse(params, x, y), jnp.float32(x.shape[0])


def of_carry(params, seen, x, y):
    """Reads what the microbatches before have left, rather than its own."""
    loss = mse(params, seen["x"], seen["x"])
    return {"x": jnp.tanh(seen["x"])}, loss


def totals(params, x, y):
    """Of integers alone."""
    return mpmd.mark_stage_end((x * 8).astype(int))


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (gradients, {}),
        (totals, {}),
        (gradients, {"operation": (mpmd.Concat(), mpmd.Add)}),
        (gradients, {"microbatches": 1}),
        (counted, {"operation": (mpmd.Concat(), mpmd.Add)}),
        (of_carry, {"carry": {"x": jnp.ones((4, 4))}}),
    ],
)
def test_a_loop_that_reads_something_of_its_microbatch_is_none(fun, options):
    assert warned(loop(fun, **options), weights(2), *batch()) == []


def test_one_microbatch_may_be_the_whole_batch():
    xs, ys = batch(1)
    fun = lambda params, x, y: jax.value_and_grad(mse)(params, xs[0], ys[0])  # noqa: E731
    assert warned(loop(fun, microbatches=1), weights(2), xs, ys) == []


# One random key for all microbatches.


def dropped(key, h):
    return h * jax.random.bernoulli(key, 0.5, h.shape)


def noisy(params, x, key):
    h = mpmd.mark_stage_end(layer(params[0], dropped(key, x)))
    return jnp.mean(layer(params[1], h) ** 2)


def noisy_scan(params, x, key):
    """The key goes into a scan, as for the layers of a model, and changes from one iteration to the next."""

    def body(carry, w):
        h, key = carry
        key, sub = jax.random.split(key)
        return (dropped(sub, jnp.tanh(h @ w)), key), None

    (h, _), _ = jax.lax.scan(body, (x, key), jnp.stack([params[0]["w"]] * 2))
    return jnp.mean(layer(params[1], mpmd.mark_stage_end(h)) ** 2)


def noisy_cond(params, x, key):
    h = jax.lax.cond(x[0, 0] > 0, lambda: dropped(key, x), lambda: x)
    return jnp.mean(layer(params[1], mpmd.mark_stage_end(layer(params[0], h))) ** 2)


def noisy_while(params, x, key):
    h = jax.lax.fori_loop(0, 2, lambda i, h: dropped(jax.random.fold_in(key, i), h), x)
    return jnp.mean(layer(params[1], mpmd.mark_stage_end(layer(params[0], jax.lax.stop_gradient(h)))) ** 2)


NOISY = [noisy, jax.checkpoint(noisy), jax.jit(noisy), noisy_scan, noisy_cond, noisy_while]
TYPED, RAW = jax.random.key(0), jax.random.PRNGKey(0)
DRAWS = [*((fun, TYPED) for fun in NOISY), (noisy_scan, RAW)]


@pytest.mark.parametrize(("fun", "key"), DRAWS)
def test_one_key_for_all_microbatches_is_a_warning(fun, key):
    def step(params, xs, key):
        one = lambda mb: jax.value_and_grad(fun)(params, mb, key)  # noqa: E731
        return mpmd.treduce(one, xs, mpmd.Std1F1B(2), operation=mpmd.Add)

    ((category, text),) = warned(step, weights(2), batch()[0], key)
    assert category is errors.SharedKeyWarning
    assert "draws the same random numbers in all of its 4 microbatches" in text and "(dropped)" in text


@pytest.mark.parametrize(("fun", "key"), [(noisy, TYPED), (noisy_while, TYPED), (noisy_scan, RAW)])
def test_a_key_for_each_microbatch_is_none(fun, key):
    def of_split(params, xs, key):
        one = lambda mb: jax.value_and_grad(fun)(params, *mb)  # noqa: E731
        return mpmd.treduce(one, (xs, jax.random.split(key, 4)), mpmd.Std1F1B(2), operation=mpmd.Add)

    def of_index(params, xs, key):
        one = lambda i: jax.value_and_grad(fun)(params, xs[i], jax.random.fold_in(key, i))  # noqa: E731
        return mpmd.treduce_i(one, 4, mpmd.Std1F1B(2), operation=mpmd.Add)

    def of_carry(params, xs, key):
        def one(key, x):
            key, sub = jax.random.split(key)
            return key, jax.value_and_grad(fun)(params, x, sub)

        return mpmd.treduce(one, xs, mpmd.Std1F1B(2), operation=mpmd.Add, carry=key)

    for step in (of_split, of_index, of_carry):
        assert warned(step, weights(2), batch()[0], key) == []


def test_random_numbers_before_the_loop_are_none():
    def step(params, xs, key):
        ys = jax.random.normal(key, xs.shape)
        one = lambda mb: jax.value_and_grad(mse)(params, *mb)  # noqa: E731
        return mpmd.treduce(one, (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Add)

    assert warned(step, weights(2), batch()[0], TYPED) == []


def test_a_key_that_is_a_constant_is_none():
    """It is meant to draw the same in every step, as for a fixed projection."""

    def fixed(params, x, y):
        projected = x @ jax.random.normal(jax.random.key(7), (x.shape[-1],) * 2)
        return jax.value_and_grad(mse)(params, projected, y)

    assert warned(loop(fixed), weights(2), *batch()) == []


# Groups without a stage.


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (2, None),
        (3, "group 2 has no work: the step's loops compute on 2 of 3 groups. Have a mesh of 2 groups"),
        (5, "groups 2..4 have no work: the step's loops compute on 2 of 5 groups"),
    ],
)
def test_groups_without_a_stage_are_a_warning(groups, text):
    found = warned(TRAIN, weights(2), *batch(), groups=groups)
    assert [category for category, _ in found] == [errors.IdleGroupWarning] * (text is not None)
    assert text is None or found[0][1].startswith(text)


def test_a_step_without_a_loop_may_use_some_of_the_groups():
    assert warned(lambda x: x + 1, jnp.ones(3), groups=3) == []


# State that is not donated.


def undonated(step, needed, limits):
    """The warnings of groups whose devices need so many bytes and have those of ``limits``."""
    parts = dict.fromkeys(MemoryParts.__dataclass_fields__, 0)
    memory = [GroupMemory(needed, MemoryParts(**{**parts, next(iter(parts)): needed}), None)] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_undonated_state(step.plan, step.compiled.step.fed_back, memory, dict(enumerate(limits)))
    return [str(warning.message) for warning in caught]


def test_state_that_is_little_of_the_memory_is_none():
    assert undonated(planned(TRAIN, weights(2), *batch()), 10_000, (2000, 2000)) == []


@pytest.mark.parametrize(
    ("limits", "options", "groups"),
    [
        ((1000, 1000), {}, [0, 1]),
        ((1000, 100_000), {}, [0]),
        ((100_000, 100_000), {}, []),
        ((1000, 1000), {"donate_argnums": 0}, []),
    ],
)
def test_state_that_is_not_donated_is_a_warning_where_memory_is_short(limits, options, groups):
    texts = undonated(planned(TRAIN, weights(2), *batch(), **options), 900, limits)
    assert len(texts) == len(groups)
    for group, text in zip(groups, texts, strict=True):
        # A weight of 4 x 4 and a bias of 4 floats.
        assert f"each device of group {group} needs 900 B of its 1000 B, and of that 80 B for state" in text
        assert f"such as args[0][{group}]['b'], args[0][{group}]['w']: name its argument" in text


def test_it_is_given_when_a_step_is_loaded(mesh, monkeypatch):
    monkeypatch.setattr(worker, "memory_limit", lambda devices: 100)
    with pytest.warns(errors.UndonatedStateWarning, match="name its argument in donate_"):
        mpmd.jit(TRAIN, mesh).compile(weights(2), *batch())

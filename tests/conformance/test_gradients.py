"""``value_and_grad`` of batches cut into microbatches, against ``jax.value_and_grad`` of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.plan import Cell
from mpmd.language.decisions import Decisions, decided
from tests.support.collectives import collectives_of
from tests.support.explicit import assert_as_on_one_group, draws, grid
from tests.support.models import WIDTH, descend, layer, mse, planned, squares, weights
from tests.support.parity import assert_close, assert_like_jit, assert_parity_on, mesh_of

ROWS = 12
X, Y = draws(ROWS, WIDTH, seed=1), draws(ROWS, WIDTH, seed=2)
COUNTED = np.isin(np.arange(ROWS), [0, 1, 2, 3, 4, 7, 9])
"""Of three rows each 3, 2, 1 and 1 count; of four rows each 4, 2 and 1."""


def counted_mean(params, x, y, counted):
    """The mean over the rows that count."""
    losses = jnp.mean((layer(params, x) - y) ** 2, axis=1)
    return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)


def how_many(params, x, y, counted):
    return jnp.sum(counted)


def assert_like_jax(loss, *arguments, has_aux=False, tolerance=2e-5, **options):
    """Asserts that ``mpmd.value_and_grad`` of microbatches is ``jax.value_and_grad`` of the whole batch."""
    actual = jax.jit(mpmd.value_and_grad(loss, has_aux=has_aux, **options))(*arguments)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))(*arguments)
    assert_close(actual, expected, tolerance)
    return actual


@pytest.mark.parametrize("n", [1, 3])
def test_a_mean(n):
    """``grad`` gives the gradients alone."""
    actual = assert_like_jax(mse, weights(2), X, Y, num_microbatches=n)
    assert_close(mpmd.grad(mse, num_microbatches=n)(weights(2), X, Y), actual[1])


def test_a_sum():
    def total(params, x, y):
        return jnp.sum((layer(params, x) - y) ** 2)

    assert_like_jax(total, weights(1)[0], X, Y, num_microbatches=4, reduction="sum")


@pytest.mark.parametrize("n", [1, 4])
def test_microbatches_that_count_differently(n):
    arguments = (weights(1)[0], X, Y, COUNTED)
    actual = assert_like_jax(counted_mean, *arguments, num_microbatches=n, reduction=how_many)
    plain = jax.jit(mpmd.value_and_grad(counted_mean, num_microbatches=n))(*arguments)
    assert n == 1 or abs(plain[0] - actual[0]) > 1e-3, "the weights make a difference"


def test_a_microbatch_that_counts_nothing_adds_nothing():
    """Of it the loss and its gradient are NaN."""
    counted = jnp.arange(ROWS) < 5
    arguments = (weights(1)[0], X, Y, counted)
    assert np.isnan(counted_mean(*(a[9:] if a is not arguments[0] else a for a in arguments)))
    assert_like_jax(counted_mean, *arguments, num_microbatches=4, reduction=how_many)


@pytest.mark.parametrize("least", [0, 1])
def test_a_batch_that_counts_nothing(least):
    """It is what the loss makes of it: NaN, or 0 where the loss takes care."""

    def loss(w, x, counted):
        return jnp.sum(jnp.where(counted, x * w, 0)) / jnp.maximum(jnp.sum(counted), least)

    arguments = (jnp.float32(2), X[:, 0], jnp.zeros(ROWS, bool))
    assert_like_jax(loss, *arguments, num_microbatches=3, reduction=lambda w, x, c: c.sum())


def test_weights_of_half_precision_keep_their_range():
    """As many tokens as float16 cannot count, and gradients that it could not hold times their number."""

    def loss(w, x, count):
        return jnp.mean(w * x)

    w, x = jnp.float16(1), jnp.full((4,), 100, jnp.float16)
    count = jnp.array([100_000, 200_000, 300_000, 400_000])
    actual = mpmd.value_and_grad(loss, num_microbatches=4, reduction=lambda w, x, c: c.sum())(w, x, count)
    assert_close(actual, (jnp.float16(100), jnp.float16(100)), 2e-3)


# Arguments.


def test_several_arguments_and_those_given_by_name():
    def loss(x, first, last, y, *, scale, name):
        assert name == "a string" and isinstance(scale, float)
        return scale * squares(layer(last, layer(first, x)), y)

    arguments, named = (X, *weights(2), Y), {"scale": 0.5, "name": "a string"}
    actual = mpmd.value_and_grad(loss, (2, 1), num_microbatches=4)(*arguments, **named)
    assert_close(actual, jax.value_and_grad(loss, (2, 1))(*arguments, **named))
    chosen = mpmd.value_and_grad(loss, 1, num_microbatches=4, batch_argnums=(0, -1))
    assert_close(chosen(*arguments, **named), jax.value_and_grad(loss, 1)(*arguments, **named))


def test_scalars_and_what_is_no_array_stay_what_they_are():
    def loss(params, batch, train, key, rate):
        rows.append(len(batch["x"]))
        assert train is True and batch["none"] is None and isinstance(batch["name"], str)
        assert key.shape == rate.shape == batch["scalar"].shape == ()
        return jnp.mean(layer(params, batch["x"]) * jax.random.normal(key, (WIDTH,))) * rate * batch["scalar"]

    rows = []
    batch = {"x": X, "none": None, "name": "a", "scalar": np.float32(3)}
    arguments = (weights(1)[0], batch, True, jax.random.key(3), jnp.float32(2))
    actual = mpmd.value_and_grad(loss, num_microbatches=4)(*arguments)
    assert set(rows) == {3}
    assert_close(actual, jax.value_and_grad(loss)(*arguments))


def test_a_key_for_each_row():
    def loss(params, x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
        return jnp.mean(layer(params, x + noise) ** 2)

    assert_like_jax(loss, weights(1)[0], X, jax.random.split(jax.random.key(0), ROWS), num_microbatches=4)


# Auxiliary output.


def with_aux(params, x, y):
    h = layer(params, x)
    aux = {
        "rows": h,
        "classes": jnp.argmax(h, -1),
        "last": (h.T, h.sum(1)),
        "norm": jnp.mean(h**2),
        "features": jnp.mean(h, 0).astype(jnp.bfloat16),
    }
    return squares(h, y), aux


@pytest.mark.parametrize("n", [1, 4])
def test_auxiliary_output_is_that_of_the_whole_batch(n):
    options = {"has_aux": True, "num_microbatches": n}
    actual = jax.jit(mpmd.value_and_grad(with_aux, **options))(weights(1)[0], X, Y)
    (value, aux), grads = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(weights(1)[0], X, Y)
    assert_close(actual[0][1].pop("features"), aux.pop("features"), 1e-2)
    assert_close(actual, ((value, aux), grads))
    actual = jax.jit(mpmd.grad(with_aux, **options))(weights(1)[0], X, Y)
    actual[1].pop("features")
    assert_close(actual, (grads, aux))


def test_an_axis_of_single_rows_that_is_squeezed_has_to_be_said():
    def loss(w, x):
        of_rows = jnp.sum((x * w) ** 2, -1)
        return jnp.mean(of_rows), jnp.squeeze(of_rows)

    differentiate = mpmd.value_and_grad(loss, has_aux=True, num_microbatches=ROWS)
    with pytest.raises(TypeError, match=r"is float32\[\] of a microbatch and float32\[\d+\] of the batch"):
        differentiate(jnp.float32(2), X)


def test_auxiliary_output_is_weighted_as_the_loss():
    def loss(params, x, y, counted):
        value = counted_mean(params, x, y, counted)
        return value, {"loss": value, "rows": x[:, 0]}

    arguments = (weights(1)[0], X, Y, COUNTED)
    assert_like_jax(loss, *arguments, has_aux=True, num_microbatches=4, reduction=how_many)


def test_auxiliary_output_by_operations():
    def loss(params, x, y):
        h = layer(params, x)
        aux = {"count": len(x), "largest": h.max(), "each": h.mean(), "rest": (h.mean(), h)}
        return squares(h, y), aux

    rules = {"count": mpmd.Add, "largest": mpmd.Max, "each": mpmd.Concat(), "rest": None}
    differentiate = mpmd.value_and_grad(loss, has_aux=True, num_microbatches=4, aux_reduction=rules)
    (_, aux), _ = differentiate(weights(1)[0], X, Y)
    h = layer(weights(1)[0], X)
    each = h.reshape(4, -1).mean(1)
    expected = {"count": jnp.int32(ROWS), "largest": h.max(), "each": each, "rest": (h.mean(), h)}
    assert_close(aux, expected)
    summed = mpmd.value_and_grad(lambda w, x: (w * x.sum(), x.sum()), has_aux=True, reduction="sum")
    assert_close(summed(jnp.float32(2), X)[0][1], X.sum())


def test_no_auxiliary_output_and_an_empty_one():
    differentiate = mpmd.value_and_grad(lambda w, x: (w * x.mean(), {}), has_aux=True, num_microbatches=4)
    assert_close(differentiate(jnp.float32(2), X), ((2 * X.mean(), {}), X.mean()))


# In a pipeline.


def counted_step(params, *data, n=3):
    def loss(params, x, y, counted):
        return counted_mean(params[1], mpmd.mark_stage_end(layer(params[0], x)), y, counted)

    options = {"num_microbatches": n, "schedule": mpmd.Std1F1B(2), "reduction": how_many}
    value, grads = mpmd.value_and_grad(loss, **options)(params, *data)
    return descend(params, grads), value


def test_weights_are_no_messages():
    """Each group computes the weights from the counts, before the loop."""

    step = functools.partial(counted_step, n=4)
    edges = mpmd.explain(planned(step, weights(2), X, Y, COUNTED)).edges
    sent = [value for edge in edges for value in edge.values]
    assert {(value.aval.shape, value.count) for value in sent} == {((3, WIDTH), 4)}


def test_weights_of_sharded_rows():
    """Gradients times the weight of their microbatch are summed over the devices after the loop, too."""
    with mesh_of(2, data=2) as mesh:
        specs = (P(), P("data"), P("data"), P("data"))
        loaded = assert_parity_on(mesh, counted_step, weights(2), X, Y, COUNTED, in_specs=specs)
        in_loop, _ = collectives_of(loaded, mesh)
    # The loss itself divides by what counts on all devices.
    assert {shape for found in in_loop.values() for c in found for shape in c.shapes} <= {()}


def test_rows_along_explicit_axes():
    """Their types say how they are sharded, those of auxiliary output, too."""

    def step(w, x):
        def loss(w, x):
            h = jnp.tanh(jnp.einsum("bk,kn->bn", x, w[0], out_sharding=P("fsdp")))
            out = jnp.einsum("bk,kn->bn", mpmd.mark_stage_end(h), w[1], out_sharding=P("fsdp"))
            return jnp.mean(out**2), {"out": out, "features": out.T}

        differentiate = mpmd.value_and_grad(
            loss,
            has_aux=True,
            num_microbatches=3,
            schedule=mpmd.Std1F1B(2),
            reduction=lambda w, x: jnp.sum(x > 0),
        )
        (value, aux), grads = differentiate(w, x)
        assert jax.typeof(aux["out"]).sharding.spec == P("fsdp", None)
        assert jax.typeof(aux["features"]).sharding.spec == P(None, "fsdp")
        return descend(w, grads), (value, aux)

    args, specs = ([stage["w"] for stage in weights(2)], X), ([P(), P()], P("fsdp"))
    with mpmd.MpmdMesh(grid(2, 2), "stage") as mesh:
        assert_as_on_one_group(mesh, step, args, specs)


def decided_step(params, x, y):
    loss, grads = mpmd.value_and_grad(mse)(params, x, y)
    return descend(params, grads), loss


def test_what_a_plan_decides(mesh):
    decisions = Decisions(schedule=mpmd.GPipe(2), num_microbatches=6)
    loaded = assert_like_jit(mesh, decided(decided_step, decisions), weights(2), X, Y)
    first_tasks = [str(run.task) for run in loaded.plan.programs[0].runs if isinstance(run.task, Cell)]
    assert first_tasks == [f"{kind}_0__{i}" for kind in ("fwd", "bwd") for i in range(6)]
    with pytest.raises(mpmd.CompileError, match=r"treduce at .*test_gradients.py:.*has no schedule: give"):
        planned(decided_step, weights(2), X, Y)


def test_a_number_of_microbatches_that_nothing_says_is_one():
    assert mpmd.microbatches(X).shape == (1, ROWS, WIDTH)
    assert decided(mpmd.microbatches, Decisions(num_microbatches=3))(X).shape == (3, ROWS // 3, WIDTH)
    assert decided(mpmd.microbatches, Decisions(num_microbatches=3))(X, 2).shape == (2, ROWS // 2, WIDTH)


# Bad input.


def loss_of_two(params, x, y):
    return jnp.mean(layer(params, x) - y), (jnp.argmax(x), jnp.all(y))


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"num_microbatches": 5}, (X, Y), ValueError, r"12 rows do not divide into 5 .*args\[1\] has shape"),
        ({}, (X, Y[:4]), ValueError, r"same number of rows, and args\[1\].* args\[2\].*batch_argnums"),
        ({"batch_argnums": (0, 1)}, (X, Y), ValueError, r"args\[0\] is differentiated .* and cut"),
        (
            {"batch_argnums": (3, 0), "argnums": (0, 7)},
            (X, Y),
            ValueError,
            r"argnums 7 of 3 positional arguments; batch_argnums 3 of 3 .*; args\[0\] is differentiated",
        ),
        ({"batch_argnums": ()}, (X, Y), ValueError, "has no array with rows"),
        ({}, ([1.0, 2.0], 3.0), ValueError, r"args\[1\], args\[2\] has no array with rows .*np\.asarray"),
        ({"argnums": 1, "batch_argnums": 2}, (jnp.arange(ROWS), Y), TypeError, "real- or complex-valued"),
        ({"reduction": lambda p, x, y: x}, (X, Y), TypeError, r"a real scalar, .* float32\[1, 4\]"),
        ({"has_aux": True}, (X, Y), TypeError, "a pair, the value and the auxiliary output"),
    ],
)
def test_bad_input(options, arguments, error, message):
    options = {"num_microbatches": 12, **options}
    with pytest.raises(error, match=message):
        mpmd.value_and_grad(lambda p, x, y: jnp.mean(layer(p, x) - y), **options)(weights(1)[0], *arguments)


def test_bad_reductions():
    with pytest.raises(ValueError, match=r"\"mean\", \"sum\", or a function .* not 'max'"):
        mpmd.value_and_grad(mse, reduction="max")
    differentiate = mpmd.value_and_grad(loss_of_two, has_aux=True, num_microbatches=4)
    with pytest.raises(TypeError, match=r"aux\[0\] is int32\[\] of .*, aux\[1\] is bool\[\] of a microbatch"):
        differentiate(weights(1)[0], X, Y)
    wrong = {"aux_reduction": {"a": mpmd.Add}}
    with pytest.raises(TypeError, match="not a pytree prefix of the auxiliary output"):
        mpmd.value_and_grad(loss_of_two, has_aux=True, num_microbatches=4, **wrong)(weights(1)[0], X, Y)


def test_without_auxiliary_output_its_reduction_does_nothing():
    assert_like_jax(mse, weights(2), X, Y, num_microbatches=3, aux_reduction={"a": mpmd.Add})

"""``mpmd.check`` tells faults from rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmd
from mpmd.checking.judge import Check, LeafCheck, Verdict
from tests.support.models import squares
from tests.support.parity import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

WIDTH, HEADS, TOKENS = 16, 2, 6
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2)}


def block(params, x):
    """Attention whose query, key and value have biases; that of the keys has no effect."""
    qkv = (x @ params["qkv"] + params["bias"]).reshape(*x.shape[:-1], 3, HEADS, -1)
    q, k, v = (qkv[..., i, :, :] for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["out"]


def loss_fn(params, x, y, dtype=jnp.float32):
    x = x.astype(dtype)
    for i, layer in enumerate(params):
        x = block(jax.tree.map(lambda leaf: leaf.astype(dtype), layer), x)
        if i < len(params) - 1:
            x = mpmd.mark_stage_end(x)
    return squares(x.astype(jnp.float32), y)


def make_step(optimizer, dtype=jnp.float32, fault=lambda grads: grads):
    def train_step(state, xs, ys):
        params, opt_state = state

        def grad_fn(mb):
            loss, grads = jax.value_and_grad(loss_fn)(params, *mb, dtype)
            return loss, fault(grads)

        loss, grads = mpmd.treduce(grad_fn, (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Mean)
        updates, opt_state = OPTIMIZERS[optimizer].update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def arguments(optimizer):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=0.3):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    params = [
        {"qkv": normal(WIDTH, 3 * WIDTH), "bias": normal(3 * WIDTH), "out": normal(WIDTH, WIDTH)}
        for _ in range(2)
    ]
    data = (normal(4, 2, TOKENS, WIDTH, scale=1.0) for _ in range(2))
    return (params, OPTIMIZERS[optimizer].init(params)), *data


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def sgd(mesh):
    return mpmd.jit(make_step("sgd"), mesh, donate_argnums=0).compile(*arguments("sgd"))


@pytest.fixture(scope="module")
def half(mesh):
    """Computes in half precision."""
    return mpmd.jit(make_step("adam", jnp.bfloat16), mesh, donate_argnums=0).compile(*arguments("adam"))


def backwards(step):
    """The same step, in which the microbatches are summed up in the other order."""
    return lambda state, xs, ys: step(state, xs[::-1], ys[::-1])


def test_equal_but_for_rounding(sgd):
    given = arguments("sgd")
    check = mpmd.check(sgd, backwards(make_step("sgd")), *given)
    assert check.ok, str(check)
    assert "no leaf differs by more than rounding in 3 steps" in str(check)
    assert len(check.leaves) == len(jax.tree.leaves(given[0])) + 1
    assert max(leaf.difference for leaf in check.leaves) > 0
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.slow
def test_equal_but_for_rounding_in_half_precision(half):
    check = mpmd.check(half, backwards(make_step("adam", jnp.bfloat16)), *arguments("adam"))
    assert check.ok, str(check)
    assert max(leaf.difference for leaf in check.leaves) > 1e-3


def test_key_biases_are_known_to_be_rounding(mesh):
    """Under Adam a third of the biases moves by the learning rate, in a direction that nobody knows."""
    step = make_step("adam")
    check = mpmd.check(mpmd.jit(step, mesh), backwards(step), *arguments("adam"))
    assert check.ok, str(check)
    bias, out = (
        next(leaf for leaf in check.leaves if leaf.path == f"result[0][0][1]['{name}']")
        for name in ("bias", "out")
    )
    assert bias.difference > 1e-3 > 1e-4 > out.difference > 0
    assert 0.2 < bias.decided_by_rounding < 0.5 and out.decided_by_rounding < 0.05


def scaled(grads, part, factor):
    return [*grads[:-1], {**grads[-1], part: grads[-1][part] * factor}]


FAULTS = {
    "a gradient is one percent too large": lambda grads: scaled(grads, "out", 1.01),
    "a bias has a wrong sign where it has an effect": lambda grads: scaled(
        grads, "bias", jnp.where(jnp.arange(3 * WIDTH) == 3, -1.0, 1.0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(sgd, fault):
    check = mpmd.check(sgd, make_step("sgd", fault=fault), *arguments("sgd"))
    assert not check.ok
    assert "DIFFERS" in str(check) and "leaves differ by more than rounding" in str(check)


@pytest.mark.slow
def test_a_fault_under_adam_and_in_half_precision_is_found(half):
    """A sign is wrong; Adam does not see a wrong size."""
    wrong = make_step("adam", jnp.bfloat16, lambda grads: scaled(grads, "out", -1.0))
    check = mpmd.check(half, wrong, *arguments("adam"), steps=1)
    assert [leaf.path for leaf in check.differing] == [
        "result[0][0][1]['out']",
        "result[0][1][0].mu[1]['out']",
    ]


def test_other_leaves(mesh):
    """Keys, integers, numbers that are none, keyword and static arguments, and shapes of a compiled step."""

    def step(state, xs, *, power):
        key, count = state
        total = mpmd.treduce(
            lambda x: mpmd.mark_stage_end(x).sum() ** power, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )
        return (jax.random.split(key)[0], count + 1), {"total": total, "nan": total * jnp.nan}

    jitted = mpmd.jit(step, mesh, static_argnames="power", donate_argnums=0)
    state = jax.random.key(1), 3
    xs = jnp.ones((2, 3)) / 3
    check = mpmd.check(jitted, step, state, xs, power=2)
    assert check.ok and {leaf.verdict for leaf in check.leaves} <= {Verdict.EQUAL, Verdict.CLOSE}
    assert not state[0].is_deleted()
    assert mpmd.check(jitted.compile(state, xs, power=2), step, state, xs, power=2, steps=1).ok

    def ends_in_numbers(state, xs, *, power):
        state, results = step(state, xs, power=power)
        return state, {**results, "nan": results["total"]}

    (wrong,) = mpmd.check(jitted, ends_in_numbers, state, xs, power=2).differing
    assert wrong.path == "result[1]['nan']" and wrong.difference == np.inf


def test_what_cannot_be_compared(sgd):
    step, given = make_step("sgd"), arguments("sgd")
    with pytest.raises(ValueError, match="the step returns"):
        mpmd.check(sgd, lambda *args: step(*args)[1], *given)
    with pytest.raises(ValueError, match=r"result\[1\] is float32\[\], and the reference's is float16\[\]"):
        mpmd.check(sgd, lambda *args: (step(*args)[0], jnp.float16(0)), *given)
    with pytest.raises(TypeError, match="step must be a step"):
        mpmd.check(step, sgd, *given)


def test_specs_without_a_mesh_are_over_the_axes_of_a_group():
    def step(w, xs):
        def loss(x):
            x = jax.lax.with_sharding_constraint(x, jax.P("data"))
            return jnp.mean(mpmd.mark_stage_end(x @ w) ** 2)

        return mpmd.treduce(loss, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Mean)

    with mesh_of(2, data=2) as mesh:
        assert mpmd.check(mpmd.jit(step, mesh), step, jnp.eye(4), jnp.ones((2, 2, 4))).ok


def leaf_check(path, difference, verdict):
    return LeafCheck(path, difference, 1e-7, 1.0, int(verdict is Verdict.DIFFERS), 0.0, verdict)


def test_the_text_has_the_worst_ten_leaves_first():
    good = [leaf_check(f"result['{i}']", i * 1e-9, Verdict.CLOSE) for i in range(20)]
    wrong = leaf_check("result['wrong']", 1e-3, Verdict.DIFFERS)
    worse = leaf_check("result['worse']", 1e-2, Verdict.DIFFERS)
    equal = [leaf_check(f"result['equal {i}']", 0.0, Verdict.EQUAL) for i in range(5)]
    check = Check((*equal, *good, wrong, worse), steps=3)
    header, *rows, rest, summary = str(check).splitlines()
    assert header.startswith("leaf")
    assert [row.split("'")[1] for row in rows] == ["worse", "wrong", *map(str, range(19, 11, -1))]
    assert rest == "17 leaves more are no worse; check.text() has all"
    assert summary == "2 of 27 leaves differ by more than rounding in 3 steps"
    assert [leaf.path for leaf in check.worst[:2]] == [worse.path, wrong.path]
    assert [row.split("'")[1] for row in check.text().splitlines()[1:-1]] == [
        leaf.path.split("'")[1] for leaf in check.leaves
    ]


def test_the_text_of_few_leaves_has_all_in_their_order():
    check = Check(tuple(leaf_check(f"result[{i}]", i * 1e-9, Verdict.CLOSE) for i in range(10)), steps=1)
    assert str(check) == check.text()
    assert [row.split()[0] for row in str(check).splitlines()[1:-1]] == [leaf.path for leaf in check.leaves]

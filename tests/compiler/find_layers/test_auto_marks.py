"""``auto_marks`` changes no number, marks what it is asked to, and says what it cannot do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpmd
from mpmd.compiler.find_layers.find_layers import find_layers, opened_for_layers
from mpmd.compiler.jaxprs.equations import all_eqns, is_remat, subjaxprs
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.language.decisions import Decisions, decided
from mpmd.language.remat import Remat
from mpmd.planner.profiling.tracing import EACH_LAYER, traced_layers
from tests.support.effort import costly
from tests.support.models import batch, layer, planned, rows, sgd_step, squares, unmarked, weights
from tests.support.parity import assert_close
from tests.support.programs.found_layers import language_model, scanned_words, words
from tests.support.random_programs.draw import layers as random_layers
from tests.support.random_programs.layers import apply


def loss(params, x, y):
    return squares(unmarked(params, x), y)


@functools.cache
def arguments():
    """Six layers and a microbatch."""
    return weights(6), *rows(batch(), 0)


@functools.cache
def words_arguments():
    return scanned_words(), *rows(words(), 0)


def boundaries(fun, *args):
    """The marks that end stages in a function."""
    return [mark.boundary for _, mark in marks_in(jax.make_jaxpr(fun)(*args).jaxpr) if not mark.linear]


def assert_same(fun, other, *args):
    assert_close(jax.jit(fun)(*args), jax.jit(other)(*args), tolerance=1e-6)


def test_nothing_is_marked_unless_something_asks():
    assert boundaries(mpmd.auto_marks(loss), *arguments()) == []
    assert len(boundaries(mpmd.auto_marks(loss, num_stages=3), *arguments())) == 2
    assert (
        len(boundaries(decided(mpmd.auto_marks(loss), Decisions(layers_per_stage=(1, 4, 1))), *arguments()))
        == 2
    )
    assert len(boundaries(decided(mpmd.auto_marks(loss, 2), EACH_LAYER), *arguments())) == 5, (
        "decisions come first"
    )


TRANSFORMATIONS = {
    "checkpoint and grad": lambda fun: jax.grad(jax.checkpoint(fun)),
    "vmap": lambda fun: jax.vmap(jax.grad(fun), in_axes=(None, 0, 0)),
    "forward mode": lambda fun: jax.jacfwd(lambda params, x, y: fun(params, x, y)),
}


@pytest.mark.parametrize("of", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformations(of):
    assert_same(of(mpmd.auto_marks(loss, 3)), of(loss), *arguments())


def test_leaves_that_are_no_arrays_stay_what_they_are():
    def fun(params, x, names, *, scale):
        for p in params:
            x = layer(p, x)
        return scale * jnp.mean(x), names | {"scale": scale}

    args = weights(3), arguments()[1], {"none": None, "name": "it"}
    value, aux = mpmd.auto_marks(fun, 3)(*args, scale=2)
    assert_close(value, fun(*args, scale=2)[0], tolerance=1e-6)
    assert aux == {"none": None, "name": "it", "scale": 2}


def test_marks_of_its_own_are_left():
    def marked(params, x, y):
        x = mpmd.mark_stage_end(layer(params[0], x), name="mine")
        return loss(params[1:], x, y)

    found = boundaries(mpmd.auto_marks(marked, 4), *arguments())
    assert [boundary.name for boundary in found] == ["mine"]


@pytest.mark.usual("counts0-iterations0", "counts4-iterations4", "counts2-iterations2")
@pytest.mark.parametrize(
    ("counts", "iterations"),
    [
        ((2, 3, 2), [2, 3, 1]),
        ((1, 5, 1), [1, 5]),
        ((3, 4), [3, 3]),
        ((7,), [6]),
        ((6, 1), [6]),
        ((1, 1, 5), [1, 1, 4]),
    ],
)
def test_ends_within_a_scan(counts, iterations):
    """The first layer is the embedding and an iteration, the last one the head, the others iterations."""
    args = words_arguments()
    fun = decided(mpmd.auto_marks(language_model), Decisions(layers_per_stage=counts))
    if len(counts) == 3:
        assert_same(jax.grad(fun), jax.grad(language_model), *args)
    eqns = jax.make_jaxpr(fun)(*args).eqns
    calls = [inner.eqns[0] for eqn in eqns for inner in subjaxprs(eqn) if inner.eqns]
    scans = [eqn for eqn in (*eqns, *calls) if eqn.primitive.name == "scan"]
    assert [scan.params["length"] for scan in scans] == iterations
    assert len(boundaries(fun, *args)) == len(counts) - 1


def remats(jaxpr):
    return sum(map(is_remat, all_eqns(jaxpr.eqns)))


@pytest.mark.parametrize(
    ("fun", "args", "count"),
    [(loss, arguments, 6), (language_model, words_arguments, 3)],
    ids=["written", "scanned"],
)
def test_rematerialised_layers(fun, args, count):
    """Of the scan its body counts once; the embedding and the head are layers."""
    wanted = decided(mpmd.auto_marks(fun), Decisions(remat=(Remat.NOTHING_SAVEABLE,)))
    assert remats(jax.make_jaxpr(wanted)(*args()).jaxpr) == count


def test_layers_under_checkpoint_stay_as_they_are():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(params, x, y):
        for p in params:
            x = jax.checkpoint(layer, policy=policy)(p, x)
        return squares(x, y)

    both = decided(mpmd.auto_marks(fun, 3), Decisions(remat=(Remat.NOTHING_SAVEABLE,)))
    jaxpr = jax.make_jaxpr(both)(*arguments()).jaxpr
    assert [eqn.params["policy"] for eqn in jaxpr.eqns if is_remat(eqn)] == [policy] * 6
    assert remats(jaxpr) == 6


def step_of(loss_fn, stages=2):
    return sgd_step(loss_fn, mpmd.Std1F1B(stages))


def counted(step, args, decisions=EACH_LAYER):
    """How many stages there are, and whether they are written."""
    (loop,) = traced_layers(step, args, {}, decisions).written.values()
    return loop.stages.count, loop.stages.are_written


def test_towers_share_stages_only_where_their_user_says_so():
    def towers(mark):
        def fun(params, x, y):
            for i, p in enumerate(params):
                x, y = layer(p, x), layer(p, y)
                if i < len(params) - 1:
                    x, y = mark(x), mark(y)
            return squares(x, y)

        return fun

    args = weights(3), *batch()
    assert counted(step_of(towers(mpmd.mark_stage_end), 3), args) == (3, True)
    count, are_written = counted(step_of(mpmd.auto_marks(towers(lambda x: x))), args)
    assert count > 3 and not are_written


def test_loops_of_a_function_that_is_traced_once_are_decided_together():
    descend = jax.jit(lambda w, x: w - mpmd.treduce(lambda row: w * row, x, operation=mpmd.Add))

    def step(w, x):
        first = mpmd.treduce(lambda row: w * row, x, operation=mpmd.Add)
        return mpmd.treduce(lambda row: row, x, operation=mpmd.Add) + descend(descend(first, x), x)

    for _ in range(2):  # the second time from JAX's caches, if they were shared
        graph = traced_layers(step, (jnp.ones(3), jnp.ones((4, 3))), {}).graph
        numbers = [loop.decision_index for loop in graph.step.loops]
        assert numbers == [0, 1, 2, 2]


def narrow_ends(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def test_as_many_layers_are_found_for_microbatches_of_other_sizes():
    widths = (16, 64, 64, 64, 64, 64, 4)
    params = [jnp.ones(shape) for shape in itertools.pairwise(widths)]

    def ends(num_rows, counts):
        fun = decided(mpmd.auto_marks(narrow_ends), Decisions(layers_per_stage=counts))
        return len(boundaries(fun, params, jnp.ones((num_rows, 16))))

    found = {num_rows: 1 + ends(num_rows, ()) for num_rows in (1, 32)}
    assert found[1] != found[32], "what is small depends on the rows"
    for num_rows, layers in itertools.product(found, found.values()):
        assert ends(num_rows, (1,) * layers) == layers - 1


def nothing(x):
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("fun", "args", "decisions", "message"),
    [
        (mpmd.auto_marks(nothing, 2), lambda: (jnp.ones(4),), Decisions(), "found nothing to cut in nothing"),
        (
            mpmd.auto_marks(loss),
            arguments,
            Decisions(layers_per_stage=(40, 30)),
            r"\(40, 30\) divides 70 .* found \d+ in",
        ),
        (
            mpmd.auto_marks(loss),
            arguments,
            Decisions(layers_per_stage=(6, 0)),
            r"each stage has one at least",
        ),
    ],
)
def test_what_cannot_be_cut_as_asked(fun, args, decisions, message):
    with pytest.raises(ValueError, match=message):
        decided(fun, decisions)(*args())


def test_modules_that_are_changed_in_place():
    from flax import nnx

    def fun(model, x):
        for linear in model[:4]:
            x = linear(x)
        return jnp.mean(model[4](x))

    def model(last):
        return nnx.List([*(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)), last])

    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"fun changes .*mean.* in place"):
        mpmd.auto_marks(fun, 3)(model(nnx.BatchNorm(4, rngs=nnx.Rngs(4))), x)


@pytest.mark.slow
@costly
@given(st.lists(random_layers(weights=2), min_size=1, max_size=7), st.data())
def test_random_functions(chain, data):
    """Whatever a function does and wherever it is cut, its value and gradients stay."""

    def fun(params, x, y):
        kept = [x]
        for one in chain:
            x = apply(one, params, x, index=0)
            kept.append(x)
        return squares(x + kept[-2], y), kept[-2:]

    args = weights(2), *rows(batch(), 0)
    layers = len(find_layers(opened_for_layers(jax.make_jaxpr(fun)(*args)).jaxpr))
    ends = data.draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else ()
    counts = tuple(np.diff([0, *sorted(ends), layers]).tolist())
    remat = tuple(data.draw(st.sampled_from(Remat)) for _ in counts)
    marked = decided(mpmd.auto_marks(fun), Decisions(layers_per_stage=counts, remat=remat))
    both = (jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (marked, fun))
    assert_close(*both)


def test_what_is_said_of_chosen_ends_of_stages_speaks_of_no_mark():
    """The user wrote none."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    def step(weights, x):
        return mpmd.auto_marks(loss, num_stages=2)(weights, x)

    with pytest.warns(mpmd.PerformanceWarning) as caught:
        planned(step, [jnp.ones((4, 4))] * 4, jnp.ones((2, 4)))
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith("the end of a stage that mpmd.plan or auto_marks(num_stages=...) has chosen")
    assert "mark_stage_end" not in text and "test_auto_marks.py" in text

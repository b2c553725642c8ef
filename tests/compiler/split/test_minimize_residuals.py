"""What forwards keep for their backwards."""

import functools
import itertools

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Var

import mpmd
from mpmd.compiler.jaxprs.equations import all_eqns
from mpmd.compiler.split.minimize_residuals import _minimum_cut
from mpmd.keys import to_aval
from mpmd.language.decisions import planning
from tests.support.levels import task_graph
from tests.support.models import BATCH, WIDTH, batch, layer, mse, sgd_step, squares, weights

ACTIVATIONS = BATCH * WIDTH * 4
"""Bytes of a stage's activations."""

ONE_F_ONE_B = mpmd.Std1F1B(2)


def split_works(stage, schedule=ONE_F_ONE_B):
    step = sgd_step(functools.partial(mse, layer=stage), schedule)
    graph = task_graph(step, weights(2), *batch(), groups=2)
    return {str(member.work): member for member in graph.stage_work}


def kept(works, forward="fwd_0", backward="bwd_0"):
    """The shapes, dtypes and sizes of what a backward reads of its forward."""
    return [to_aval(var) for var in works[backward].reads if var in works[forward].makes]


def count(eqns, primitive):
    return sum(eqn.primitive.name == primitive for eqn in all_eqns(eqns))


def gelu(p, h):
    return jax.nn.gelu(h @ p["w"] + p["b"])


def dear(p, h):
    return h + jnp.tanh(h @ p["w"]) * jax.nn.softmax(h @ p["w"])


def powers(p, h):
    product = h @ p["w"]
    return product**3 + product**5


def narrowed(p, h):
    narrow = (h @ p["w"]).astype(jnp.bfloat16)
    return jnp.sin(narrow.astype(jnp.float32)) * narrow.astype(jnp.float32)


def dropped(p, h):
    mask = jax.random.bernoulli(jax.random.key(h.sum().astype(int)), 0.9, h.shape)
    return jnp.where(mask, jnp.tanh(h @ p["w"]) / 0.9, 0)


def causal(p, h):
    scores = jnp.where(jnp.tril(jnp.ones((BATCH, BATCH), bool)), h @ h.T, -jnp.inf)
    return jax.nn.softmax(scores) @ (h @ p["w"])


def sines(p, h):
    return jnp.sin(h @ p["w"]) + (h * h) @ p["w"]


def with_tanh(h, w):
    return h + jnp.tanh(h @ w) @ w


KERNEL = mpmd.cost(with_tanh, operations=1.0, dimensions="bi,io->bo", divides="b")


def test_an_activation_function_keeps_its_input_and_its_tanh():
    works = split_works(gelu)
    assert sum(aval.nbytes for aval in kept(works)) == 2 * ACTIVATIONS


def test_what_is_dear_runs_once():
    works = split_works(dear)
    for primitive, times in (("dot_general", 2), ("tanh", 1), ("exp", 1), ("reduce_sum", 1)):
        assert count(works["fwd_0"].eqns, primitive) == times, primitive
    for primitive in ("tanh", "exp"):
        assert count(works["bwd_0"].eqns, primitive) == 0, primitive


def test_a_forward_computes_nothing_that_only_the_backward_reads():
    works = split_works(powers)
    assert count(works["fwd_0"].eqns, "integer_pow") == 2  # and not their derivatives
    assert count(works["bwd_0"].eqns, "integer_pow") == 2
    assert [aval.shape for aval in kept(works)] == [(BATCH, WIDTH)]


def test_a_checkpointed_stage_keeps_nothing_beside_its_input():
    works = split_works(jax.checkpoint(gelu))
    assert kept(works) == []  # it has the microbatch anyway
    assert count(works["bwd_0"].eqns, "tanh") == 1


def test_a_narrow_value_is_kept_in_place_of_a_wide_copy():
    dtypes = {aval.dtype for aval in kept(split_works(narrowed)) if aval.shape == (BATCH, WIDTH)}
    assert "bfloat16" in dtypes


def test_random_numbers_are_drawn_once_and_masks_are_kept():
    works = split_works(dropped)
    assert count(works["fwd_1"].eqns, "random_bits") == 1
    assert count(works["bwd_1"].eqns, "random_bits") == 0
    assert "bool" in {aval.dtype for aval in kept(works, "fwd_1", "bwd_1")}


def test_causal_masks_are_made_where_they_are_read():
    assert "bool" not in {aval.dtype for aval in kept(split_works(causal))}


def test_a_slice_keeps_what_each_slice_has_made_and_not_what_it_joins_of_that():
    def loss(params, x, y):
        made, total = [], 0.0
        for start, stop in ((0, 1), (1, 2), (2, 4)):
            rows, targets = x[start:stop], y[start:stop]
            made.append(rows @ params[0]["w"])
            h = mpmd.mark_stage_end(jax.nn.softmax(rows @ jnp.concatenate(made).T) @ jnp.concatenate(made))
            total += squares(layer(params[1], h), targets)
        return total

    graph = task_graph(sgd_step(loss, mpmd.Seq1F1B(2, 3)), weights(2), *batch(), groups=2)
    works = {str(member.work): member for member in graph.stage_work}
    assert (2, WIDTH) not in {aval.shape for aval in kept(works, "fwd_2", "bwd_2")}  # of the second slice


def test_what_is_kept_anyway_serves_others_too():
    works = split_works(sines)
    (received,) = set(works["fwd_0"].makes) & set(works["fwd_1"].reads)
    assert received in works["bwd_1"].reads
    assert len(kept(works, "fwd_1", "bwd_1")) == 2  # what the sine is taken of, and the loss's difference


def test_a_kernel_keeps_its_operands_alone_while_a_plan_is_made():
    def stage(p, h):
        return KERNEL(h, p["w"])

    with planning():
        assert kept(split_works(stage)) == []  # it has the microbatch anyway
    assert kept(split_works(stage)) == kept(split_works(lambda p, h: with_tanh(h, p["w"])))


def test_halves_of_a_backward_recompute_what_each_reads():
    def stage(p, h):
        return gelu(p, h) * (h @ p["w"]) + h

    works, plain = split_works(stage, mpmd.ZeroBubble(2)), split_works(stage)
    products = sum(count(work.eqns, "dot_general") for work in works.values())
    assert products == sum(count(work.eqns, "dot_general") for work in plain.values())


def test_sizes_may_be_anything():
    large, small = (Var(jax.core.ShapedArray((size,), jnp.int8)) for size in (2**50, 2**45))
    costs = {large: 2**50, small: 2**45}
    assert _minimum_cut({small: None, large: {small}}, [large], costs) == {small}
    assert _minimum_cut({large: None, small: {large}}, [small], costs) == {small}


@st.composite
def derivations(draw):
    """Variables, each to be kept or made of earlier ones; those wanted, perhaps twice; what each costs."""
    edges, costs = {}, {}
    for _ in range(draw(st.integers(1, 8))):
        sources = draw(st.none() | st.sets(st.sampled_from(list(edges)), max_size=3)) if edges else None
        var = Var(jax.core.ShapedArray((), jnp.float32))
        edges[var] = sources
        costs[var] = draw(st.sampled_from([1, 300, 1000, 5000]))
    return edges, draw(st.lists(st.sampled_from(list(edges)), max_size=4)), costs


@given(derivations())
def test_a_minimum_cut_is_the_cheapest_of_all_that_suffice(case):
    edges, targets, costs = case

    def suffices(chosen):
        def can_be_made(var):
            return var in chosen or (edges[var] is not None and all(map(can_be_made, edges[var])))

        return all(map(can_be_made, targets))

    found = _minimum_cut(edges, targets, costs)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(edges, size) for size in range(len(edges) + 1)
    )
    least = min(sum(map(costs.get, subset)) for subset in subsets if suffices(set(subset)))
    assert suffices(found)
    assert sum(map(costs.get, found)) == least

"""The table of rules against equations. ``tests/conformance/test_programs.py`` knows all programs' own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpmd
from mpmd.compiler.jaxprs.rules import (
    RULES,
    common_dimensions,
    exact_dimensions,
    likely_dimensions,
    part_params,
    shared_dimensions,
)
from mpmd.compiler.jaxprs.sharded_dimensions import follow, sharded
from mpmd.compiler.shard.microbatch_dimensions import microbatch_dimensions
from mpmd.planner.profiling.microbatch import origin_of
from tests.support.primitives import WITHOUT_RULE


def last_equation(fun, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.make_jaxpr(fun)(*arguments).jaxpr.eqns[-1]


def pairs(dimensions):
    return [(dict(one.ins), dict(one.outs)) for one in dimensions]


def test_what_has_a_rule_is_not_listed_as_without_one():
    assert not RULES.keys() & WITHOUT_RULE.keys()


EXACT = {
    "transpose": (lambda x: x.T, [(4, 6)], [({0: 1}, {0: 0}), ({0: 0}, {0: 1})]),
    "merged": (lambda x: x.reshape(24, 5), [(4, 6, 5)], [({0: 0}, {0: 0}), ({0: 2}, {0: 1})]),
    "split": (lambda x: x.reshape(4, 6), [(24,)], [({0: 0}, {0: 0})]),
    "merged and split": (lambda x: x.reshape(8, 3), [(4, 6)], [({0: 0}, {0: 0})]),
    "ones around": (lambda x: x.reshape(4, 1, 6), [(1, 4, 6, 1)], [({0: 1}, {0: 0}), ({0: 2}, {0: 2})]),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [(4, 1, 6)], [({0: 0}, {0: 0}), ({0: 2}, {0: 1})]),
    "broadcast": (
        lambda x: jnp.broadcast_to(x, (3, 4, 6)),
        [(1, 6)],
        [({}, {0: 0}), ({}, {0: 1}), ({0: 1}, {0: 2})],
    ),
    "sum": (lambda x: x.sum(0), [(4, 6)], [({0: 0}, {}), ({0: 1}, {0: 0})]),
    "argmax": (lambda x: lax.argmax(x, 0, jnp.int32), [(4, 6)], [({0: 1}, {0: 0})]),
    "product": (
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
        [(2, 3, 4), (2, 4, 5)],
        [({0: 0, 1: 0}, {0: 0}), ({0: 1}, {0: 1}), ({1: 2}, {0: 2}), ({0: 2, 1: 1}, {})],
    ),
    "counted": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 0), [], [({}, {0: 1})]),
    "each second element": (lambda x: x[::2, :2], [(4, 6)], [({0: 0}, {0: 0})]),
    "padded": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))), [(4, 6)], [({0: 0}, {0: 0})]),
    "updated rows": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
        [(4, 6), (2, 6)],
        [({0: 1, 1: 1}, {0: 1})],
    ),
    "sorted": (lambda x: lax.sort(x, dimension=1), [(4, 6)], [({0: 0}, {0: 0})]),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_dimensions(name):
    fun, shapes, expected = EXACT[name]
    found = pairs(exact_dimensions(last_equation(fun, *shapes)))
    assert sorted(found, key=repr) == sorted(expected, key=repr)


SHARED = {
    "counted": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 0), [], ({}, {0: 0})),
    "rows of a table": (lambda x: x.at[jnp.array([2, 0])].get(mode="clip"), [(4, 6)], ({0: 0}, {})),
    "rows that are added": (
        lambda x: x.at[jnp.array([2, 0])].add(jnp.ones((2, 6))),
        [(4, 6)],
        ({1: 0, 2: 0}, {}),
    ),
    "rows that are replaced": (lambda x: x.at[jnp.array([2, 0])].set(1.0), [(4, 6)], ({0: 0}, {0: 0})),
    "channels": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"),
        [(2, 3, 8, 8), (4, 3, 3, 3)],
        ({0: 1, 1: 1}, {}),
    ),
    "behind a barrier": (lambda x, y: lax.optimization_barrier((x, y)), [(4, 6), (3,)], ({0: 1}, {0: 1})),
}


@pytest.mark.parametrize("name", SHARED)
def test_devices_share_more_than_equations_for_parts_can(name):
    fun, shapes, expected = SHARED[name]
    eqn = last_equation(fun, *shapes)
    assert expected in pairs(shared_dimensions(eqn))
    assert expected not in pairs(exact_dimensions(eqn))


@pytest.mark.parametrize(
    "reduce", [lax.reduce_and, lax.reduce_or, lax.reduce_xor, lax.reduce_max, lax.reduce_sum]
)
def test_results_of_parts_are_combined(reduce):
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    eqn = last_equation(lambda x: reduce(x, (0,)), x.shape, dtype=jnp.int32)
    (reduced,) = (one for one in exact_dimensions(eqn) if one.is_reduced)
    combined = reduced.combine(reduce(x[:1], (0,)), reduce(x[1:], (0,)))
    np.testing.assert_array_equal(combined, reduce(x, (0,)))


def test_parameters_of_a_part():
    eqn = last_equation(lambda x: lax.slice(x, (0, 1), (4, 5), (2, 1)), (4, 6))
    (rows,) = exact_dimensions(eqn)
    assert part_params(eqn, rows, 1) == {"limit_indices": (1, 5)}
    eqn = last_equation(lambda x: x.reshape(4, 2, 3), (4, 6))
    first, _ = exact_dimensions(eqn)
    assert part_params(eqn, first, 3) == {"new_sizes": (3, 2, 3)}


def test_dimensions_of_one_element_are_common_and_of_no_use():
    eqn = last_equation(lambda x: x.T, (1, 6))
    assert len(list(common_dimensions(eqn))) == 2 and pairs(exact_dimensions(eqn)) == [({0: 1}, {0: 0})]


LIKELY = {
    "sorted": (lambda x: lax.sort(x, dimension=1), [(4, 6)], ({0: 1}, {0: 1})),
    "updated rows": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
        [(4, 6), (2, 6)],
        ({0: 0}, {0: 0}),
    ),
    "without a rule": (lambda x: lax.tile(x, (2, 1)), [(4, 6)], ({0: 1}, {0: 1})),
    "each its own": (lambda x, y: mpmd.mark_stage_end((x, y)), [(4,), (4,)], ({1: 0}, {1: 0})),
}


@pytest.mark.parametrize("name", LIKELY)
def test_what_no_rule_promises_is_guessed_to_stay_in_place(name):
    fun, shapes, expected = LIKELY[name]
    eqn = last_equation(fun, *shapes)
    assert expected in pairs(likely_dimensions(eqn))
    assert expected not in pairs(shared_dimensions(eqn))


def test_what_moves_is_not_guessed_to_stay_in_place():
    eqn = last_equation(lambda x, y: x @ y, (4, 4), (4, 4))
    assert all(one.promise == "exact" for one in likely_dimensions(eqn))


MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))

FOLLOWED = {
    "merged": (lambda x: x.reshape(24, 5), [("a",), (), ("b",)], (4, 6, 5), [("a",), ("b",)]),
    "split in too few": (lambda x: x.reshape(3, 8), [("b",)], (24,), [(), ()]),
    "split": (lambda x: x.reshape(8, 3), [("b",)], (24,), [("b",), ()]),
    "columns of a table": (
        lambda x: x.at[jnp.array([2, 0])].get(mode="clip"),
        [(), ("a",)],
        (4, 6),
        [(), ("a",)],
    ),
    "the same axis twice": (lambda x: x @ x.T, [("a",), ()], (4, 4), [("a",), ()]),
    "constrained": (
        lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec("b"))),
        [("a",), ()],
        (4, 6),
        [("b",), ()],
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_follows_how_values_are_sharded(name):
    fun, given, shape, expected = FOLLOWED[name]
    jaxpr = jax.make_jaxpr(fun)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr
    found = follow(jaxpr.eqns, {jaxpr.invars[0]: tuple(given)}, MESH.shape)
    assert sharded(jaxpr.outvars[0], found) == tuple(expected)


def test_rows_that_are_cut_into_microbatches_stay_sharded():
    jaxpr = jax.make_jaxpr(lambda x: x.reshape(4, 4, 3))(jax.ShapeDtypeStruct((16, 3), jnp.float32)).jaxpr
    found = follow(jaxpr.eqns, {jaxpr.invars[0]: (("b",), ())}, MESH.shape, {jaxpr.outvars[0]: 0})
    assert sharded(jaxpr.outvars[0], found) == ((), ("b",), ())


def test_dimensions_that_count_microbatches_are_found_behind_what_moves_them():
    def batches(x):
        return jnp.moveaxis(x.astype(jnp.bfloat16), 1, 0)[:, None] * 2

    jaxpr = jax.make_jaxpr(batches)(jax.ShapeDtypeStruct((8, 4, 3), jnp.float32)).jaxpr
    assert microbatch_dimensions(jaxpr.eqns, {jaxpr.outvars[0]: 0})[jaxpr.invars[0]] == 1


SPLIT = [((16, 3), (4, 4, 3), 1, 0), ((4, 6), (2, 12), 1, None)]


@pytest.mark.parametrize(("shape", "target", "dim", "expected"), SPLIT)
def test_origins_of_split_dimensions(shape, target, dim, expected):
    jaxpr = jax.make_jaxpr(lambda x: x.reshape(target))(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr
    origin = origin_of(jaxpr.outvars[0], dim, jaxpr.eqns)
    assert origin == (None if expected is None else (jaxpr.invars[0], expected))

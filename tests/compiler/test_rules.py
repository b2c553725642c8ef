"""The table of rules against equations. ``tests/conformance/test_programs.py`` knows all programs' own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmd
from mpmd.compiler.jaxprs.rules import (
    RULES,
    exact_dimensions,
    likely_dimensions,
    shared_dimensions,
)
from tests.support.primitives import WITHOUT_RULE


def last_equation(fun, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.make_jaxpr(fun)(*arguments).jaxpr.eqns[-1]


def pairs(dimensions):
    return [(dict(one.ins), dict(one.outs)) for one in dimensions]


def test_what_has_a_rule_is_not_listed_as_without_one():
    assert not RULES.keys() & WITHOUT_RULE.keys()


# Rows of the third dimension belong to groups; the batch of the first operand is its second dimension.
ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers((([3], [2]), ([1], [1])), [2], [0])

SHARED = {
    "counted": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 0), [], ({}, {0: 0})),
    "rows of a table": (lambda x: x.at[jnp.array([2, 0])].get(mode="clip"), [(4, 6)], ({0: 0}, {})),
    "rows that are replaced": (lambda x: x.at[jnp.array([2, 0])].set(1.0), [(4, 6)], ({0: 0}, {0: 0})),
    "channels": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"),
        [(2, 3, 8, 8), (4, 3, 3, 3)],
        ({0: 1, 1: 1}, {}),
    ),
    "rows with groups of their own": (
        lambda x, w: lax.ragged_dot_general(x, w, jnp.ones((2, 5, 4), int), ROWS_BY_GROUP),
        [(5, 2, 6, 3), (4, 2, 3, 7)],
        ({0: 0, 2: 1}, {0: 1}),
    ),
    "a batch of groups": (
        lambda x, w: lax.ragged_dot_general(x, w, jnp.ones((2, 5, 4), int), ROWS_BY_GROUP),
        [(5, 2, 6, 3), (4, 2, 3, 7)],
        ({0: 1, 1: 1, 2: 0}, {0: 0}),
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_devices_share_more_than_equations_for_parts_can(name):
    fun, shapes, expected = SHARED[name]
    eqn = last_equation(fun, *shapes)
    assert expected in pairs(shared_dimensions(eqn))
    assert expected not in pairs(exact_dimensions(eqn))


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
    assert not likely_dimensions(last_equation(lambda x: x.reshape(2, 0), (0, 4)))

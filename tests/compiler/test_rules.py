"""The table of rules against equations. ``tests/conformance/test_programs.py`` knows all programs' own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.rules import (
    RULES,
    common_dimensions,
    exact_dimensions,
    part_params,
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


def test_disjoint_sets():
    sets = DisjointSets()
    sets.join("ab")
    sets.join("cd")
    assert sets.find("b") == "a" and sets.find("e") == "e"
    sets.join("db")
    assert sets.sets() == [["a", "b", "c", "d"], ["e"]]
    assert set(sets.representatives().values()) == {"c", "e"}

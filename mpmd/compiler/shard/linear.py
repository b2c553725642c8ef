"""Says in which operands the result of an equation is linear."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from mpmd.compiler.jaxprs.equations import Atom, aval_of
from mpmd.compiler.jaxprs.sharded_dimensions import dimensions_of

Positions = tuple[int, ...]

_IN_THE_FIRST = frozenset(
    """
    broadcast_in_dim copy copy_p cumsum dynamic_slice expand_dims imag neg real reduce_sum reshape rev
    slice split squeeze transpose
    """.split()
)
_SHARDING_CONSTRAINTS = frozenset("reshard sharding_constraint".split())
_IN_ALL = frozenset("add add_any concatenate sub".split())
_IN_SOME: Mapping[str, Positions] = {
    "dynamic_update_slice": (0, 1),
    "pad": (0, 1),
    "scatter-add": (0, 2),
}
_IN_EITHER = frozenset("dot_general mul".split())


def linear_positions(eqn: JaxprEqn) -> tuple[Positions, ...]:
    """Returns each choice of operands in which an equation is linear while the other operands are fixed.

    For example ``((0, 1),)``: linear in both together, as a sum is; ``((0,), (1,))``: linear in either
    operand, as a product is. Floating-point numbers count as real numbers. An equation without a rule has no
    choice: ``()``.
    """
    name, operands = eqn.primitive.name, tuple(range(len(eqn.invars)))
    if name in _IN_THE_FIRST | _SHARDING_CONSTRAINTS or (
        name in ("convert_element_type", "div") and _keeps_sums(eqn)
    ):
        return ((0,),)
    if name in _IN_ALL:
        return (operands,)
    if name in _IN_SOME:
        return (_IN_SOME[name],)
    if name == "select_n":
        return (operands[1:],)
    if name in _IN_EITHER and eqn.invars[0] is not eqn.invars[1]:
        return ((0,), (1,))
    return ()


def is_sharding_constraint(eqn: JaxprEqn) -> bool:
    """Whether an equation only says where its operand should be."""
    return eqn.primitive.name in _SHARDING_CONSTRAINTS


def constrained_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Returns the mesh axes of the sharding that an equation, a sharding constraint, requires of its value.

    Sums that are partial along such an axis would have to be gathered in the dimension that the axis shards.
    """
    sharding = eqn.params.get("sharding") if is_sharding_constraint(eqn) else None
    entries = getattr(sharding, "spec", None) or ()
    return frozenset(
        axis for entry in entries if isinstance(entry, str | tuple) for axis in dimensions_of((entry,), 1)[0]
    )


def _keeps_sums(eqn: JaxprEqn) -> bool:
    """Whether a conversion or a division does not cut digits off, as those to integers do."""
    old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    if jnp.issubdtype(old, jnp.complexfloating) != jnp.issubdtype(new, jnp.complexfloating):
        return False
    return bool(jnp.issubdtype(old, jnp.number) and jnp.issubdtype(new, jnp.inexact))


def is_zero(atom: Atom, makers: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a value is a literal zero, or the broadcast of a literal zero."""
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    eqn = makers.get(atom)
    return (
        eqn is not None
        and eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], Literal)
        and is_zero(eqn.invars[0], makers)
    )

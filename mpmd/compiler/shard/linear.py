"""Says in which operands the result of an equation is linear."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from mpmd.compiler.jaxprs.equations import Atom, aval_of
from mpmd.sharding import axes_named

Positions = tuple[int, ...]

_SHARDING_CONSTRAINTS = frozenset("reshard sharding_constraint".split())

_FIRST, _SECOND = slice(1), slice(1, 2)


def _rule(primitives: str, *choices: slice) -> dict[str, tuple[slice, ...]]:
    return dict.fromkeys(primitives.split(), choices)


_LINEAR: Mapping[str, tuple[slice, ...]] = {
    **_rule("broadcast_in_dim convert_element_type copy copy_p cumsum div dynamic_slice expand_dims", _FIRST),
    **_rule("imag neg real reduce_sum reshape reshard rev sharding_constraint slice split", _FIRST),
    **_rule("squeeze transpose", _FIRST),
    **_rule("add add_any concatenate sub", slice(None)),
    **_rule("dynamic_update_slice pad", slice(2)),
    **_rule("scatter-add", slice(0, 3, 2)),
    **_rule("select_n", slice(1, None)),
    **_rule("dot_general mul", _FIRST, _SECOND),
}
"""For each primitive, the choices of operands in which it is linear while the other operands are fixed."""


def linear_positions(eqn: JaxprEqn) -> tuple[Positions, ...]:
    """Returns each choice of operands in which an equation is linear while the other operands are fixed.

    For example ``((0, 1),)``: linear in both together, as a sum is; ``((0,), (1,))``: linear in either
    operand, as a product is. Floating-point numbers count as real numbers. An equation without a rule has no
    choice: ``()``.
    """
    name, positions = eqn.primitive.name, tuple(range(len(eqn.invars)))
    if name in ("convert_element_type", "div") and not _keeps_sums(eqn):
        return ()
    if name in ("dot_general", "mul") and eqn.invars[0] is eqn.invars[1]:  # a square
        return ()
    return tuple(positions[choice] for choice in _LINEAR.get(name, ()))


def is_sharding_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _SHARDING_CONSTRAINTS


def constrained_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Returns the mesh axes of the sharding that an equation, a sharding constraint, requires of its value.

    Sums that are partial along such an axis would have to be gathered in the dimension that the axis shards.
    """
    sharding = eqn.params.get("sharding") if is_sharding_constraint(eqn) else None
    return frozenset(axes_named(sharding) if isinstance(sharding, NamedSharding) else ())


def _keeps_sums(eqn: JaxprEqn) -> bool:
    """Whether a conversion or a division does not cut digits off, as conversions to integers do."""
    old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    if jnp.issubdtype(old, jnp.complexfloating) != jnp.issubdtype(new, jnp.complexfloating):
        return False
    return bool(jnp.issubdtype(old, jnp.number) and jnp.issubdtype(new, jnp.inexact))


def is_zero(atom: Atom, makers: Mapping[Var, JaxprEqn]) -> bool:
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    eqn = makers.get(atom)
    return (
        eqn is not None
        and eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], Literal)
        and is_zero(eqn.invars[0], makers)
    )

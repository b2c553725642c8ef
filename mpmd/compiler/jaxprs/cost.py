"""Costs of equations, by primitive: which are cheap, elementwise, exact, or fused with their readers."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.equations import all_eqns, is_inexact, size
from mpmd.compiler.jaxprs.rules import ELEMENTWISE

_LAYOUT = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty expand_dims gather iota pad
    reshape rev scatter scatter-add scatter-max scatter-min scatter-mul sharding_constraint slice split
    squeeze transpose
    """.split()
)

_ORDER = frozenset("cumlogsumexp cummax cummin cumprod cumsum sort top_k".split())

_REDUCTION = frozenset(
    """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """.split()
)

_RANDOM = frozenset(
    """
    random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32
    """.split()
)

_TRANSCENDENTAL = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log
    log1p log2 logistic pow rsqrt sin sinh tan tanh
    """.split()
)

_VIEW = frozenset(
    """
    broadcast_in_dim dynamic_slice empty expand_dims iota reshape rev slice split squeeze transpose
    """.split()
)

_MOVED = frozenset("concatenate copy copy_p gather pad select_n stack unstack".split())

_RENAMED = frozenset("expand_dims kernel_boundary pvary reshape sharding_constraint squeeze".split())

_WINDOW = frozenset("dynamic_slice gather slice split".split())

_FUSED = (
    ELEMENTWISE
    | _REDUCTION
    | _RANDOM
    | (_VIEW - _WINDOW)
    | frozenset("kernel_boundary pad pvary sharding_constraint".split())
)

_CHEAP = ELEMENTWISE | _LAYOUT | _ORDER | _REDUCTION | _RANDOM
_CHEAPER_THAN_MEMORY = (ELEMENTWISE - _TRANSCENDENTAL) | _VIEW


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether running the equation costs about as much as reading its operands once or twice."""
    return _all_in(eqn, _CHEAP)


def is_elementwise(eqn: JaxprEqn) -> bool:
    return _all_in(eqn, ELEMENTWISE)


def is_cheaper_than_memory(eqn: JaxprEqn) -> bool:
    """Whether running the equation, merged with its reader, costs less than to write and read its result."""
    return _all_in(eqn, _CHEAPER_THAN_MEMORY)


def is_exact(eqn: JaxprEqn) -> bool:
    """Whether the results are the same bits wherever, and with whatever else, the equation is compiled.

    So it is for what rounds nothing: integers, keys, and values that are only moved. Random numbers, which
    are expensive, do not count.
    """
    if draws_random_bits(eqn):
        return False
    if _all_in(eqn, _VIEW | _MOVED):
        return True
    return is_cheap(eqn) and not all(any(map(is_inexact, atoms)) for atoms in (eqn.invars, eqn.outvars))


def is_fused(eqn: JaxprEqn) -> bool:
    """Whether XLA computes the result where it is read, if that is fused, too, and writes it nowhere."""
    return eqn.primitive.name in _FUSED


def is_renamed(eqn: JaxprEqn) -> bool:
    """Whether the result of an equation is its operand's memory, in the same order."""
    return eqn.primitive.name in _RENAMED


def is_window(eqn: JaxprEqn) -> bool:
    """Whether the results are parts of the first operand, which readers can read there."""
    return eqn.primitive.name in _WINDOW


def has_reduction(eqn: JaxprEqn) -> bool:
    return _any_in(eqn, _REDUCTION)


def draws_random_bits(eqn: JaxprEqn) -> bool:
    """Whether the equation draws more than a few random numbers: the most expensive cheap equation."""
    return _any_in(eqn, frozenset({"random_bits", "threefry2x32"})) and any(
        size(var) > 16 for var in eqn.outvars
    )


def _all_in(eqn: JaxprEqn, names: frozenset[str]) -> bool:
    return not eqn.effects and eqn.primitive.name in names


def _any_in(eqn: JaxprEqn, names: frozenset[str]) -> bool:
    return any(one.primitive.name in names for one in all_eqns([eqn]))

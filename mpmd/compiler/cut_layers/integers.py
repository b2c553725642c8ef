"""Finds the integers that a step computes of nothing but constants, such as the counters of its loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from mpmd.compiler.jaxprs.equations import Atom, aval_of, size
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.language.annotate import mark_of

_LARGEST = 4096
"""Elements and iterations: what has more is data, rather than a counter or the numbers of layers."""

Known = dict[Var, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Iterated:
    """The integers in the body of a scan.

    Attributes:
      rows: for variables of the body, their values, one for each element of what is scanned over.
      final: for results that are carried, by position, the value after the last iteration.
    """

    rows: Mapping[Var, np.ndarray]
    final: Mapping[int, np.ndarray]


class Integers:
    """Integers and flags that are known of one jaxpr, and its zeros, as far as its equations were read."""

    def __init__(self, known: Mapping[Var, Any]):
        self._known: Known = {var: np.asarray(value) for var, value in known.items() if _is_integer(var)}
        self._zeros: set[Var] = set()

    def within(self, body: Sequence[Var], outside: Sequence[Atom]) -> Integers:
        """Returns the integers of a nested jaxpr whose first inputs are the atoms ``outside``."""
        inner = Integers({})
        for var, atom in zip(body, outside, strict=False):
            if (value := self.of(atom)) is not None:
                inner._known[var] = value
            if self.is_zero(atom):
                inner._zeros.add(var)
        return inner

    def of(self, atom: Atom) -> np.ndarray | None:
        return _lookup(atom, self._known)

    def is_zero(self, atom: Atom) -> bool:
        """Whether an array, of any type, has nothing but zeros."""
        return atom in self._zeros if isinstance(atom, Var) else bool(np.all(np.asarray(atom.val) == 0))

    def read(self, eqn: JaxprEqn) -> None:
        """Notes what an equation makes."""
        if eqn.primitive.name == "broadcast_in_dim" and self.is_zero(eqn.invars[0]):
            self._zeros.update(eqn.outvars)
        self._known |= _results(eqn, self._known)

    def read_scan(self, eqn: JaxprEqn, iterated: Iterated) -> None:
        """Notes what a scan makes."""
        first = scan_operands(eqn).num_carry
        stacked = zip(eqn.outvars[first:], _body(eqn).outvars[first:], strict=True)
        rows = {var: _lookup(atom, iterated.rows) for var, atom in stacked if isinstance(atom, Var)}
        self._known |= {var: value for var, value in rows.items() if value is not None and _is_integer(var)}
        self._known |= {eqn.outvars[i]: value for i, value in iterated.final.items()}

    def iterate(self, eqn: JaxprEqn, eqns: Sequence[JaxprEqn]) -> Iterated | None:
        """The integers of a scan, in each iteration; ``None`` if it counts nothing.

        Args:
          eqns: those of its body.
        """
        roles, body, length = scan_operands(eqn), _body(eqn), eqn.params["length"]
        inside = {
            var: value
            for var, atom in zip(body.invars, eqn.invars, strict=True)
            if (value := self.of(atom)) is not None
        }
        fixed = {var: inside[var] for var in body.invars[roles.consts] if var in inside}
        xs = {var: inside[var] for var in body.invars[roles.xs] if var in inside}
        carried = {
            var: after
            for var, after in zip(body.invars[roles.carry], body.outvars[: roles.num_carry], strict=True)
            if var in inside
        }
        if not (xs or carried) or not 1 < length <= _LARGEST:
            return None
        order = range(length)[:: -1 if eqn.params["reverse"] else 1]

        def iteration(state: Known, row: int) -> Known:
            return _evaluated(eqns, {**fixed, **state, **{var: value[row] for var, value in xs.items()}})

        while True:  # until what is known at first stays known
            state = {var: inside[var] for var in carried}
            values = iteration(state, order[0])
            lost = [var for var, after in carried.items() if _lookup(after, values) is None]
            if not lost:
                break
            for var in lost:
                del carried[var]
        if not (xs or carried):
            return None
        of_row: dict[int, Known] = {}
        for row in order:
            of_row[row] = iteration(state, row)
            state = {var: _known_value(after, of_row[row]) for var, after in carried.items()}
        positions = {var: i for i, var in enumerate(body.invars[roles.carry])}
        return Iterated(
            {var: np.stack([of_row[row][var] for row in range(length)]) for var in of_row[0]},
            {positions[var]: value for var, value in state.items()},
        )


def _body(eqn: JaxprEqn) -> Jaxpr:
    return eqn.params["jaxpr"].jaxpr


def _is_integer(atom: Atom) -> bool:
    aval = aval_of(atom)
    return size(atom) <= _LARGEST and (
        jnp.issubdtype(aval.dtype, jnp.integer) or jnp.issubdtype(aval.dtype, jnp.bool_)
    )


def _lookup(atom: Atom, known: Mapping[Var, np.ndarray]) -> np.ndarray | None:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, aval_of(atom).dtype) if _is_integer(atom) else None
    return known.get(atom)


def _known_value(atom: Atom, known: Mapping[Var, np.ndarray]) -> np.ndarray:
    value = _lookup(atom, known)
    assert value is not None, f"{atom} was known in the first iteration"
    return value


def _evaluated(eqns: Sequence[JaxprEqn], known: Known) -> Known:
    known = dict(known)
    for eqn in eqns:
        known |= _results(eqn, known)
    return known


def _results(eqn: JaxprEqn, known: Mapping[Var, np.ndarray]) -> Known:
    """The integers that an equation makes of known ones."""
    if mark_of(eqn) or eqn.primitive.name == "optimization_barrier":
        pairs = zip(eqn.outvars, eqn.invars, strict=True)
        return {var: value for var, atom in pairs if (value := _lookup(atom, known)) is not None}
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or not all(map(_is_integer, eqn.outvars)):
        return {}
    operands = []
    for atom in eqn.invars:
        if (value := _lookup(atom, known)) is None:
            return {}
        operands.append(value)
    aval = aval_of(eqn.outvars[0])
    with np.errstate(over="ignore"):  # integers of JAX wrap round
        return {eqn.outvars[0]: np.asarray(rule(eqn, *operands)).astype(aval.dtype).reshape(aval.shape)}


def _broadcast(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(eqn.params["shape"])
    for size_, d in zip(x.shape, eqn.params["broadcast_dimensions"], strict=True):
        shape[d] = size_
    return np.broadcast_to(x.reshape(shape), eqn.params["shape"])


def _iota(eqn: JaxprEqn) -> np.ndarray:
    return np.indices(eqn.params["shape"])[eqn.params["dimension"]]


def _slice(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    bounds = (eqn.params[name] for name in ("start_indices", "limit_indices"))
    strides = eqn.params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, *bounds, strides))]


def _ufunc(function: Callable) -> Callable:
    return lambda eqn, *operands: function(*operands)


_FUNCTIONS: dict[str, Callable] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": np.asarray,
    "copy": np.asarray,
    "copy_p": np.asarray,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "reshape": np.asarray,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "squeeze": np.asarray,
    "sub": np.subtract,
}
"""The evaluation of elements; results of another shape or type get it anyway."""

_RULES: dict[str, Callable] = {
    **{name: _ufunc(function) for name, function in _FUNCTIONS.items()},
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
}

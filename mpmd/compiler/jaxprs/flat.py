"""The equations of jaxprs as one flat list of operations on numbered values, without bodies.

So its readers need no rules for rematerialised functions and loops: each rematerialised function has values
of its own, and the operations of a loop's body are listed once, with the number of iterations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import scan_p

from mpmd.compiler.jaxprs.equations import Atom, is_remat
from mpmd.compiler.jaxprs.kernels import Around, Call, kernel_around
from mpmd.compiler.jaxprs.scans import Scan

Value = int
"""The number of a value; ``FlatEquations.avals`` has its shape and dtype."""


class Operation(NamedTuple):
    """An equation without a body.

    Attributes:
      reads: a value for each operand; ``None`` for a literal.
      makes: a value for each result.
      times: the number of runs: the product of the lengths of the scans around the equation.
      kernel: the kernel of ``mpmd.cost`` that it belongs to.
    """

    eqn: JaxprEqn
    reads: tuple[Value | None, ...]
    makes: tuple[Value, ...]
    times: int
    kernel: Call | None = None

    @property
    def values(self) -> set[Value]:
        """The values that it reads and makes."""
        return {value for value in (*self.reads, *self.makes) if value is not None}


class Passed(NamedTuple):
    """A value that a loop takes from, or hands to, another value.

    Attributes:
      axis: 1 if ``outer`` has one more dimension, the first one: the iterations; else 0.
      into: whether the loop passes the value into its body; otherwise the body returns it.
    """

    outer: Value
    inner: Value
    axis: int
    into: bool


class _Scope(NamedTuple):
    """The surroundings of equations: numbers of variables, how often they run, the operations, the kernel."""

    numbers: dict[Var, Value]
    times: int
    operations: list[Operation]
    around: Around = Around()


@dataclasses.dataclass
class FlatEquations:
    """A builder: ``add`` appends equations.

    Attributes:
      avals: of each value.
      passed: what loops hand in and out, and from one iteration to the next.
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
    """

    avals: list[Any] = dataclasses.field(default_factory=list)
    passed: list[Passed] = dataclasses.field(default_factory=list)
    flash_attention: bool = False
    _numbers: dict[Var, Value] = dataclasses.field(default_factory=dict)

    def value(self, var: Var) -> Value:
        """The value of a variable outside of bodies."""
        return self._number(var, self._numbers)

    def add(self, eqns: Iterable[JaxprEqn]) -> list[Operation]:
        operations: list[Operation] = []
        self._add(eqns, _Scope(self._numbers, 1, operations))
        return operations

    def _number(self, var: Var, numbers: dict[Var, Value]) -> Value:
        if var not in numbers:
            numbers[var] = self._new(var.aval)
        return numbers[var]

    def _new(self, aval: Any) -> Value:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _add(self, eqns: Iterable[JaxprEqn], surroundings: _Scope) -> None:
        for eqn in eqns:
            reads = tuple(self._of_atom(atom, surroundings.numbers) for atom in eqn.invars)
            around = kernel_around(eqn, surroundings.around, self.flash_attention)
            scope = surroundings._replace(around=around)
            if is_remat(eqn):
                self._inner(eqn.params["jaxpr"], eqn, reads, scope)
            elif eqn.primitive is scan_p:
                self._scan(eqn, reads, scope)
            elif eqn.primitive.name == "while":
                self._while(eqn, reads, scope)
            elif eqn.primitive.name == "cond":
                self._cond(eqn, reads, scope)
            else:
                makes = tuple(self._number(var, scope.numbers) for var in eqn.outvars)
                scope.operations.append(Operation(eqn, reads, makes, scope.times, around.kernel))

    def _of_atom(self, atom: Atom, numbers: dict[Var, Value]) -> Value | None:
        return self._number(atom, numbers) if isinstance(atom, Var) else None

    def _body(
        self, jaxpr: Jaxpr, reads: Iterable[Value | None], times: int, surroundings: _Scope
    ) -> list[Value | None]:
        """Adds the equations of a jaxpr that reads values. Returns the values of its results."""
        inputs = zip(jaxpr.invars, reads, strict=True)
        inside = {var: self._new(var.aval) if value is None else value for var, value in inputs}
        self._add(jaxpr.eqns, surroundings._replace(numbers=inside, times=times))
        return [self._of_atom(atom, inside) for atom in jaxpr.outvars]

    def _inner(self, jaxpr: Jaxpr, eqn: JaxprEqn, reads: Iterable[Value | None], scope: _Scope) -> None:
        results = self._body(jaxpr, reads, scope.times, scope)
        for var, value in zip(eqn.outvars, results, strict=True):
            if value is None or var in scope.numbers:
                self._hand(self._number(var, scope.numbers), value, 0, into=False)
            else:
                scope.numbers[var] = value

    def _hand(self, outer: Value | None, inner: Value | None, axis: int, into: bool) -> None:
        if outer is not None and inner is not None:
            self.passed.append(Passed(outer, inner, axis, into))

    def _scan(self, eqn: JaxprEqn, reads: tuple[Value | None, ...], scope: _Scope) -> None:
        scan = Scan.of(eqn)
        inputs = list(reads)
        for i, var in enumerate(scan.body.invars[scan.carry.start :], scan.carry.start):
            inputs[i] = self._new(var.aval)
            self._hand(reads[i], inputs[i], int(i >= scan.xs.start), into=True)
        results = self._body(scan.body, inputs, scope.times * scan.length, scope)
        for i, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            is_stacked = i >= scan.num_carry
            self._hand(self._number(var, scope.numbers), value, int(is_stacked), into=False)
            if not is_stacked:
                self._hand(value, inputs[scan.carry.start + i], 0, into=True)

    def _while(self, eqn: JaxprEqn, reads: tuple[Value | None, ...], scope: _Scope) -> None:
        """A ``while`` counts once: the number of its iterations is not known."""
        body: Jaxpr = eqn.params["body_jaxpr"].jaxpr
        first = eqn.params["cond_nconsts"]
        constants = eqn.params["body_nconsts"]
        consts = list(reads[first : first + constants])
        carried = [self._new(var.aval) for var in body.invars[constants:]]
        for value, inside in zip(reads[first + constants :], carried, strict=True):
            self._hand(value, inside, 0, into=True)
        results = self._body(body, [*consts, *carried], scope.times, scope)
        for var, value, inside in zip(eqn.outvars, results, carried, strict=True):
            self._hand(self._number(var, scope.numbers), value, 0, into=False)
            self._hand(value, inside, 0, into=True)

    def _cond(self, eqn: JaxprEqn, reads: tuple[Value | None, ...], scope: _Scope) -> None:
        """The branch with the most equations stands for all."""
        longest = max((branch.jaxpr for branch in eqn.params["branches"]), key=lambda jaxpr: len(jaxpr.eqns))
        self._inner(longest, eqn, reads[1:], scope)


def readers(operations: Iterable[Operation]) -> Mapping[Value, list[Operation]]:
    """For each value the operations that read it."""
    readers_of: dict[Value, list[Operation]] = {}
    for operation in operations:
        for value in dict.fromkeys(operation.reads):
            if value is not None:
                readers_of.setdefault(value, []).append(operation)
    return readers_of

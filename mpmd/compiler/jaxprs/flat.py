"""The equations of jaxprs as one flat list of operations on numbered values, without bodies.

So its readers need no rules for rematerialised functions and loops: each rematerialised function has values
of its own, and the operations of a loop's body are listed once, with the number of iterations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, is_remat
from mpmd.compiler.jaxprs.kernels import Around, KernelCall, kernel_around
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.work import total_operations

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
    kernel: KernelCall | None = None

    @property
    def values(self) -> set[Value]:
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


class _Surroundings(NamedTuple):
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
        """Finds variables outside of bodies alone: a variable in a body has a value for each call of it."""
        return self._number(var, self._numbers)

    def add(self, eqns: Iterable[JaxprEqn]) -> list[Operation]:
        operations: list[Operation] = []
        self._add(eqns, _Surroundings(self._numbers, 1, operations))
        return operations

    def _number(self, var: Var, numbers: dict[Var, Value]) -> Value:
        if var not in numbers:
            numbers[var] = self._new(var)
        return numbers[var]

    def _new(self, var: Var) -> Value:
        self.avals.append(var.aval)
        return len(self.avals) - 1

    def _add(self, eqns: Iterable[JaxprEqn], surroundings: _Surroundings) -> None:
        for eqn in eqns:
            reads = tuple(self._of_atom(atom, surroundings.numbers) for atom in eqn.invars)
            around = kernel_around(eqn, surroundings.around, self.flash_attention)
            scope = surroundings._replace(around=around)
            name = eqn.primitive.name
            if is_remat(eqn):
                self._inner(eqn.params["jaxpr"], eqn, reads, scope)
            elif name == "scan":
                scan = Scan.of(eqn)
                within = scope._replace(times=scope.times * scan.length)
                self._loop(scan.body, eqn, reads, scan.carry, within)
            elif name == "while":  # counts once: the number of its iterations is not known
                body, constants = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
                carry = slice(constants, len(body.invars))
                self._loop(body, eqn, reads[eqn.params["cond_nconsts"] :], carry, scope)
            elif name == "cond":  # the branch with the most operations stands for all
                branches = (branch.jaxpr for branch in eqn.params["branches"])
                most = max(branches, key=lambda branch: total_operations(branch.eqns))
                self._inner(most, eqn, reads[1:], scope)
            else:
                makes = tuple(self._number(var, scope.numbers) for var in eqn.outvars)
                scope.operations.append(Operation(eqn, reads, makes, scope.times, around.kernel))

    def _of_atom(self, atom: Atom, numbers: dict[Var, Value]) -> Value | None:
        return self._number(atom, numbers) if isinstance(atom, Var) else None

    def _body(self, jaxpr: Jaxpr, reads: Iterable[Value | None], scope: _Surroundings) -> list[Value | None]:
        inputs = zip(jaxpr.invars, reads, strict=True)
        inside = {var: self._new(var) if value is None else value for var, value in inputs}
        self._add(jaxpr.eqns, scope._replace(numbers=inside))
        return [self._of_atom(atom, inside) for atom in jaxpr.outvars]

    def _inner(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, reads: Iterable[Value | None], scope: _Surroundings
    ) -> None:
        results = self._body(jaxpr, reads, scope)
        for var, value in zip(eqn.outvars, results, strict=True):
            if value is None or var in scope.numbers:
                self._hand(self._number(var, scope.numbers), value, 0, into=False)
            else:
                scope.numbers[var] = value

    def _hand(self, outer: Value | None, inner: Value | None, axis: int, into: bool) -> None:
        if outer is not None and inner is not None:
            self.passed.append(Passed(outer, inner, axis, into))

    def _loop(
        self, body: Jaxpr, eqn: JaxprEqn, reads: Sequence[Value | None], carry: slice, scope: _Surroundings
    ) -> None:
        """The body's inputs behind the carried values are rows of the values ``reads``."""
        inputs = list(reads)
        for i, var in enumerate(body.invars[carry.start :], carry.start):
            inputs[i] = self._new(var)
            self._hand(reads[i], inputs[i], int(i >= carry.stop), into=True)
        results = self._body(body, inputs, scope)
        for i, (var, value) in enumerate(zip(eqn.outvars, results, strict=True), carry.start):
            is_stacked = i >= carry.stop
            self._hand(self._number(var, scope.numbers), value, int(is_stacked), into=False)
            if not is_stacked:
                self._hand(value, inputs[i], 0, into=True)

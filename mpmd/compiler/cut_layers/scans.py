"""The rule for scans over layers: a scan for each layer range, with marks where stages end in between."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from jax import lax
from jax.extend.core import Var

from mpmd.compiler.cut_layers.marked_scans import LayerScan
from mpmd.compiler.cut_layers.recompute import Passed, Recomputation, recomputation
from mpmd.compiler.cut_layers.values import Values, zeros_like
from mpmd.compiler.jaxprs.equations import Atom
from mpmd.ir.stack import Stack
from mpmd.language.annotate import Boundary, mark_p


class Boundaries:
    """The ends of stages in scans: one for each mark that the user wrote and each of its ends."""

    def __init__(self) -> None:
        self._made: dict[tuple[Boundary, int], Boundary] = {}

    def of(self, boundary: Boundary, number: int) -> Boundary:
        ends = boundary.ends[number : number + 1]
        return self._made.setdefault((boundary, number), Boundary(boundary.name, in_scan=True, ends=ends))


def add_scan(values: Values, scan: LayerScan, sizes: tuple[int, ...], boundaries: Boundaries) -> None:
    """Adds a scan for each layer range, in the order in which the scan passes through them.

    Args:
      sizes: of the layer ranges of what is scanned over.
    """
    stack = Stack(0, sizes)
    again = recomputation(scan, values.passed, stack) or Recomputation(scan, {})
    _ScanRule(values, again, stack, boundaries).add()


class _ScanRule:
    def __init__(self, values: Values, scan: Recomputation, stack: Stack, boundaries: Boundaries):
        self._values = values
        self._scan = scan.scan
        self._known = scan.starts
        self._stack = stack
        self._boundaries = boundaries

    def add(self) -> None:
        values, eqn, roles = self._values, self._scan.eqn, self._scan.operands
        fixed = [values.whole(atom, eqn) for atom in eqn.invars[roles.consts]]
        initial = [values.whole(atom, eqn) for atom in eqn.invars[roles.carry]]
        xs = [values.ranges(atom, self._stack, eqn) for atom in eqn.invars[roles.xs]]
        stacked_vars = eqn.outvars[roles.num_carry :]
        ys = [values.range_vars(var, self._stack) for var in stacked_vars]
        slices = self._stack.slices
        order = range(len(slices))[:: -1 if eqn.params["reverse"] else 1]
        carry = initial
        sums: dict[int, list[Atom]] = {i: [] for i in self._scan.added_to}
        starts: dict[int, tuple[Atom, ...]] = {}
        for number, p in enumerate(order):
            if number:
                carry = [self._known[i][p] if i in self._known else a for i, a in enumerate(carry)]
            carry = self._before(carry, slices[p])
            if number:  # the first part adds to what there is, the others to nothing
                carry = [zeros_like(values, a, eqn) if i in sums else a for i, a in enumerate(carry)]
            starts[p] = tuple(carry)
            rows = [ranges[p] for ranges in xs]
            after = self._add_range(fixed, carry, rows, [ranges[p] for ranges in ys], self._stack.sizes[p])
            for i, summands in sums.items():
                summands.append(after[i])
            carry = self._after([self._carried(i, carry, after, rows) for i in range(len(carry))], slices[p])
        for i, summands in sums.items():
            (carry[i],) = values.trace(lambda *xs: [reduce(lax.add, xs)], summands, eqn)
        for var, atom in zip(eqn.outvars[: roles.num_carry], carry, strict=True):
            values.set_whole(var, atom)
        for var, ranges in zip(stacked_vars, ys, strict=True):
            if values.planned(var) == self._stack:
                values.set_ranges(var, ranges)
            else:
                values.set_whole(var, values.joined(ranges, 0, eqn))
        passed = Passed(self._scan, self._stack, tuple(starts[p] for p in range(len(slices))))
        values.passed.update(dict.fromkeys(stacked_vars, passed))

    def _add_range(
        self, fixed: Sequence[Atom], carry: Sequence[Atom], xs: Sequence[Atom], ys: Sequence[Var], length: int
    ) -> list[Var]:
        eqn = self._scan.eqn
        after = [self._values.var_like(var) for var in eqn.outvars[: len(carry)]]
        self._values.emit(
            eqn,
            [*fixed, *carry, *xs],
            [*after, *ys],
            jaxpr=self._scan.body,
            length=length,
            unroll=min(eqn.params["unroll"], length),
        )
        return after

    def _carried(self, i: int, before: Sequence[Atom], after: Sequence[Var], xs: Sequence[Atom]) -> Atom:
        """The carry that the next part starts from."""
        if i in self._scan.unchanged:
            return before[i]
        if i in self._scan.passed_on:
            x = xs[self._scan.passed_on[i]]
            last = 0 if self._scan.eqn.params["reverse"] else -1
            return self._values.trace(
                lambda x: [lax.index_in_dim(x, last, keepdims=False)], [x], self._scan.eqn
            )[0]
        return after[i]

    def _before(self, carry: list[Atom], part: slice) -> list[Atom]:
        marks, reverse = self._scan.marks, self._scan.eqn.params["reverse"]
        if marks is None or marks.forward:
            return carry
        return self._marked(carry, part.stop if reverse else part.start)

    def _after(self, carry: list[Atom], part: slice) -> list[Atom]:
        marks, reverse = self._scan.marks, self._scan.eqn.params["reverse"]
        if marks is None or not marks.forward:
            return carry
        return self._marked(carry, part.start if reverse else part.stop)

    def _marked(self, carry: list[Atom], end: int) -> list[Atom]:
        """The carry behind the mark at the end of a stage, if one ends here."""
        marks = self._scan.marks
        assert marks is not None
        if end not in marks.ends or not marks.carried:
            return carry
        params: dict[str, Any] = {
            "boundary": self._boundaries.of(marks.boundary, marks.ends[end]),
            "forward": marks.forward,
            "linear": marks.linear,
        }
        marked = self._values.trace(
            lambda *xs: mark_p.bind(*xs, **params), [carry[i] for i in marks.carried], marks.eqn
        )
        replaced = dict(zip(marks.carried, marked, strict=True))
        return [replaced.get(i, atom) for i, atom in enumerate(carry)]

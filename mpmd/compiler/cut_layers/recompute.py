"""Keeps of a scan under ``jax.checkpoint`` no more than what enters each of its parts.

A mark under ``jax.checkpoint`` is kept, whatever its policy, so of a scan the mark of every iteration is.
Where the policy keeps nothing else of the scan, the scan that computes again what the backward reads can
start at what enters its part, which stays there anyway: it computes the marks in between again as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Jaxpr, Var, jaxpr_as_fun

from mpmd.compiler.cut_layers.marked_scans import LayerScan, read_scan
from mpmd.compiler.jaxprs.control_flow import live_body
from mpmd.compiler.jaxprs.equations import Atom, closed, with_eqns
from mpmd.compiler.jaxprs.scans import computed
from mpmd.compiler.jaxprs.source import is_transposed
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.ir.stack import Stack


@dataclasses.dataclass(frozen=True)
class Passed:
    """A marked scan that was cut.

    Attributes:
      starts: for each layer range, what is carried into it.
    """

    scan: LayerScan
    stack: Stack
    starts: tuple[tuple[Atom, ...], ...]

    @property
    def kept_marks(self) -> dict[Var, int]:
        """The results of marks that it stacks, and the position of each in the carry."""
        marks, roles = self.scan.marks, self.scan.operands
        if marks is None or not marks.forward or marks.linear:
            return {}
        outs = self.scan.body.jaxpr.outvars
        carried = {outs[i]: i for i in marks.carried if isinstance(outs[i], Var)}
        stacked = zip(self.scan.eqn.outvars[roles.num_carry :], outs[roles.num_carry :], strict=True)
        return {var: carried[atom] for var, atom in stacked if isinstance(atom, Var) and atom in carried}


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """A scan that computes again what another one has not kept.

    Attributes:
      starts: for what it carries, by position, what each layer range starts from.
    """

    scan: LayerScan
    starts: Mapping[int, Sequence[Atom]]


def recomputation(scan: LayerScan, passed: Mapping[Var, Passed], stack: Stack) -> Recomputation | None:
    """The scan with the marks that it reads computed again; ``None`` for others, and if it reads more.

    Args:
      passed: the scans that were cut, by what they stack.
    """
    eqn = scan.eqn
    xs = eqn.invars[scan.operands.xs]
    sources = {id(one): one for atom in xs if isinstance(atom, Var) and (one := passed.get(atom))}
    if len(sources) != 1 or scan.marks is not None or not is_transposed(eqn):
        return None
    (source,) = sources.values()
    marks = source.kept_marks
    read = {i: atom for i, atom in enumerate(xs) if isinstance(atom, Var) and passed.get(atom) is source}
    same = source.stack == stack and source.scan.eqn.params["reverse"] == eqn.params["reverse"]
    if not same or not marks.keys() >= set(read.values()) or is_transposed(source.scan.eqn):
        return None
    forward = _without_callbacks(source.scan.body.jaxpr)
    if forward.effects:  # whatever else has an effect is not to have it twice
        return None
    return _Fusion(scan, source, forward, {i: marks[var] for i, var in read.items()}).recomputation()


def _without_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without the callbacks in it that give nothing back, which the forward has called."""
    return with_eqns(jaxpr, [eqn for eqn in jaxpr.eqns if eqn.outvars or not eqn.effects])


class _Operands(NamedTuple):
    """The operands of a scan: constants, what it carries, and what it scans over."""

    consts: Sequence[Atom]
    carry: Sequence[Atom]
    xs: Sequence[Atom]


class _Fusion:
    """One scan of the forward's body, as far as the marks need it, and of the recomputation's behind it.

    Its operands are those of both: ``again`` are what the recomputation reads, and ``forward`` what the
    forward's body does. What the recomputation scanned over that marks return, it now takes from the forward.
    """

    def __init__(self, scan: LayerScan, source: Passed, forward: Jaxpr, marks: Mapping[int, int]):
        self._scan = scan
        self._source = source
        self._marks = marks  # for what the scan reads, by position, where the forward carries it
        carry = source.scan.operands.carry
        self._forward, used = live_body(forward, marks.values(), carry)
        self._forward_carry = [i for i, is_used in enumerate(used[carry]) if is_used]
        self._again_operands = self._operands_of_recomputation()
        self._forward_operands = self._operands_of_forward(used)

    def recomputation(self) -> Recomputation:
        """The scan, with what each of its parts starts from."""
        eqn, again, forward = self._scan.eqn, self._again_operands, self._forward_operands
        operands = [*again.consts, *forward.consts, *again.carry, *forward.carry, *again.xs, *forward.xs]
        (fused,), outvars = traced_eqns(self._function, operands)
        num_carry = len(again.carry)
        forward_after = outvars[num_carry : num_carry + len(forward.carry)]
        marks = [eqn.invars[self._scan.operands.xs][i] for i in self._marks]
        results = [*eqn.outvars[:num_carry], *forward_after, *eqn.outvars[num_carry:], *marks]
        fused = fused.replace(outvars=results, source_info=eqn.source_info)
        return Recomputation(read_scan(fused), self._starts())

    def _operands_of_recomputation(self) -> _Operands:
        invars, roles = self._scan.eqn.invars, self._scan.operands
        xs = [atom for i, atom in enumerate(invars[roles.xs]) if i not in self._marks]
        return _Operands(invars[roles.consts], invars[roles.carry], xs)

    def _operands_of_forward(self, used: Sequence[bool]) -> _Operands:
        """The forward's operands that its body still reads."""
        invars, roles = self._source.scan.eqn.invars, self._source.scan.operands
        pairs = list(zip(invars, used, strict=True))
        return _Operands(
            consts=[atom for atom, is_used in pairs[roles.consts] if is_used],
            carry=[invars[roles.carry][i] for i in self._forward_carry],
            xs=[atom for atom, is_used in pairs[roles.xs] if is_used],
        )

    def _function(self, *operands: Any) -> list[Any]:
        """The fused scan as JAX traces it.

        Returns: what both carry, what the recomputation stacks, and the marks.
        """
        again, forward = self._again_operands, self._forward_operands
        sizes = [len(field) for pair in zip(again, forward, strict=True) for field in pair]
        consts, forward_consts, *initial, xs, forward_xs = _divided(operands, sizes)
        run_again, run_forward = jaxpr_as_fun(self._scan.body), jaxpr_as_fun(closed(self._forward))
        num_carry, num_xs = len(again.carry), len(self._marks) + len(again.xs)

        def iteration(carry: list[list], rows: tuple[list, list]) -> tuple[list[list], list]:
            (carry_again, carry_forward), (rows_again, rows_forward) = carry, rows
            after_forward = run_forward(*forward_consts, *carry_forward, *rows_forward)
            marks = dict(zip(self._forward_carry, after_forward, strict=True))
            others = iter(rows_again)
            of_both = [marks[self._marks[i]] if i in self._marks else next(others) for i in range(num_xs)]
            after = run_again(*consts, *carry_again, *of_both)
            inputs = [*carry_again, *carry_forward, *rows_again, *rows_forward]
            after_both = computed([*after[:num_carry], *after_forward], inputs)
            stacked = computed([*after[num_carry:], *(marks[i] for i in self._marks.values())], inputs)
            return _divided(after_both, [num_carry, len(carry_forward)]), stacked

        params = self._scan.eqn.params
        (after, forward_after), stacks = lax.scan(
            iteration, initial, (xs, forward_xs), params["length"], params["reverse"], params["unroll"]
        )
        return [*after, *forward_after, *stacks]

    def _starts(self) -> dict[int, Sequence[Atom]]:
        """The carry into each layer range: that of the forward into it."""
        ranges, num_carry = self._source.starts, len(self._again_operands.carry)
        starts: dict[int, Sequence[Atom]] = {
            j: [part[self._marks[x]] for part in ranges]
            for j, x in self._scan.passed_on.items()
            if x in self._marks
        }
        return starts | {
            num_carry + n: [part[i] for part in ranges] for n, i in enumerate(self._forward_carry)
        }


def _divided(values: Sequence[Any], sizes: Sequence[int]) -> list[list]:
    """Values one behind the other as lists of these sizes."""
    remaining = iter(values)
    return [[next(remaining) for _ in range(size)] for size in sizes]

"""Keeps of a scan under ``jax.checkpoint`` no more than what enters each of its parts.

A mark under ``jax.checkpoint`` is kept, whatever its policy, so of a scan the mark of every iteration is.
Where the policy keeps nothing else of the scan, the scan that computes again what the backward reads can
start at what enters its part, which stays there anyway: it computes the marks in between again as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax import lax
from jax.extend.core import Jaxpr, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from mpmd.compiler.cut_layers.marked_scans import LayerScan, read_scan
from mpmd.compiler.jaxprs.equations import Atom, closed, with_eqns
from mpmd.compiler.jaxprs.scans import computed
from mpmd.compiler.jaxprs.source import is_transposed
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.ir.stack import Stack


@dataclasses.dataclass(frozen=True)
class Passed:
    """A marked scan that was cut.

    Attributes:
      starts: for each part, what is carried into it.
    """

    scan: LayerScan
    stack: Stack
    starts: tuple[tuple[Atom, ...], ...]

    @property
    def kept_marks(self) -> dict[Var, int]:
        """What it stacks that its marks return, and at which position each is carried."""
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
      starts: for what it carries, by position, what each part starts from.
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
    has_constants = bool(scan.body.consts or source.scan.body.consts)
    if not same or has_constants or not marks.keys() >= set(read.values()) or is_transposed(source.scan.eqn):
        return None
    forward = _without_callbacks(source.scan.body.jaxpr)
    if forward.effects:  # whatever else has an effect is not to have it twice
        return None
    return _Fusion(scan, source, forward, {i: marks[var] for i, var in read.items()}).made()


def _without_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without the callbacks in it that give nothing back, which the forward has called."""
    return with_eqns(jaxpr, [eqn for eqn in jaxpr.eqns if eqn.outvars or not eqn.effects])


class _Fusion:
    """One scan of the forward's body, as far as the marks need it, and of the recomputation's behind it."""

    def __init__(self, scan: LayerScan, source: Passed, forward: Jaxpr, marks: Mapping[int, int]):
        self._scan = scan
        self._source = source
        self._marks = marks  # for what the scan reads, by position, where the forward carries it
        self._forward, self._carried, self._used = self._needed_of(forward)

    def _needed_of(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[int], list[bool]]:
        """The forward's body for the marks, what it then carries, and which of its inputs it reads."""
        roles = self._source.scan.operands
        carried = set(self._marks.values())
        while True:
            wanted = [i in carried for i in range(len(jaxpr.outvars))]
            is_kept = [i - roles.carry.start in carried for i in range(roles.xs.start)]
            is_kept += [False] * (len(jaxpr.invars) - len(is_kept))
            needed, used = partial_eval.dce_jaxpr(jaxpr, wanted, is_kept)
            read = {i for i in range(roles.num_carry) if used[roles.carry.start + i]}
            if read <= carried:
                return needed, sorted(carried), used
            carried |= read

    def made(self) -> Recomputation:
        eqn, roles = self._scan.eqn, self._scan.operands
        theirs, used = self._source.scan, self._used
        consts, carry, xs = eqn.invars[roles.consts], eqn.invars[roles.carry], eqn.invars[roles.xs]
        own_xs = [atom for i, atom in enumerate(xs) if i not in self._marks]
        invars = theirs.eqn.invars
        their_consts = [invars[i] for i in range(theirs.operands.consts.stop) if used[i]]
        their_carry = [invars[theirs.operands.carry.start + i] for i in self._carried]
        first_x = theirs.operands.xs.start
        their_xs = [invars[i] for i in range(first_x, len(invars)) if used[i]]
        sizes = [len(consts), len(their_consts), len(carry), len(their_carry), len(own_xs), len(their_xs)]
        run, forward = jaxpr_as_fun(self._scan.body), jaxpr_as_fun(closed(self._forward))

        def scan(*operands):
            fixed, their_fixed, initial, their_initial, inputs, their_inputs = _cut(operands, sizes)

            def one(carry, x):
                mine, others = carry
                their_after = forward(*their_fixed, *others, *x[1])
                marks = dict(zip(self._carried, their_after, strict=True))
                own = iter(x[0])
                rows = [marks[self._marks[i]] if i in self._marks else next(own) for i in range(len(xs))]
                after = run(*fixed, *mine, *rows)
                given = [*mine, *others, *x[0], *x[1]]
                carried = computed([*after[: len(mine)], *their_after], given)
                again = [marks[i] for i in self._marks.values()]
                return _cut(carried, [len(mine), len(others)]), computed([*after[len(mine) :], *again], given)

            params = eqn.params
            start = [initial, their_initial]
            (mine, others), stacks = lax.scan(
                one, start, (inputs, their_inputs), params["length"], params["reverse"], params["unroll"]
            )
            return [*mine, *others, *stacks]

        operands = [*consts, *their_consts, *carry, *their_carry, *own_xs, *their_xs]
        (fused,), outvars = traced_eqns(scan, operands)
        others = outvars[len(carry) : len(carry) + len(their_carry)]
        marks = [xs[i] for i in self._marks]
        results = [*eqn.outvars[: len(carry)], *others, *eqn.outvars[len(carry) :], *marks]
        fused = fused.replace(outvars=results, source_info=eqn.source_info)
        return Recomputation(read_scan(fused), self._starts(len(carry)))

    def _starts(self, num_carry: int) -> dict[int, Sequence[Atom]]:
        """What is carried into each part is what the forward carried into it."""
        parts = self._source.starts
        starts: dict[int, Sequence[Atom]] = {
            j: [part[self._marks[x]] for part in parts]
            for j, x in self._scan.passed_on.items()
            if x in self._marks
        }
        return starts | {num_carry + n: [part[i] for part in parts] for n, i in enumerate(self._carried)}


def _cut(values: Sequence, sizes: Sequence[int]) -> list[list]:
    remaining = iter(values)
    return [[next(remaining) for _ in range(size)] for size in sizes]

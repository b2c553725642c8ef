"""Scans of a forward, and what their bodies can compute again in the scans of the backward that read them.

Differentiating a scan makes one that stacks what each iteration of the backward reads, and one that reads it
row by row. So a value in the first one's body can be kept, as a stack of its rows, or computed in the second
one's body from rows and constants that are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import scan_p

from mpmd.compiler.jaxprs.choices import choices_in
from mpmd.compiler.jaxprs.cost import is_cheaper_than_memory
from mpmd.compiler.jaxprs.equations import (
    Atom,
    free_variables,
    is_dropped,
    lookup,
    makers_of,
    needed_eqns,
    operands,
    substitute,
    variables,
    with_eqns,
)
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.keys import to_aval

Eqns = Sequence[JaxprEqn]


@dataclasses.dataclass(frozen=True)
class ScanRow:
    """A value in the body of a forward's scan, which is different in each iteration.

    Attributes:
      scan: which of the forward's scans.
      var: the variable of its body.
    """

    scan: int
    var: Var


Node = Var | ScanRow
"""A value that may be kept."""


class ForwardScans:
    """The scans of a forward whose stacks the scans of its backward read.

    Attributes:
      rows: for the stacks that are only read row by row, the rows. A backward that keeps these does without
        the stacks.
    """

    def __init__(self, forward: Eqns, backward: Eqns, elsewhere: Set[Var]):
        """
        Args:
          elsewhere: the variables that other work reads.
        """
        read = {var for eqn in forward for var in operands(eqn)}
        by_rows = _read_by_rows(backward) - read - elsewhere
        scans = [eqn for eqn in forward if _is_pure_scan(eqn) and not by_rows.isdisjoint(eqn.outvars)]
        self._scans = [_ForwardScan(number, eqn, by_rows) for number, eqn in enumerate(scans)]
        self.rows: dict[Var, ScanRow] = {}
        for scan in self._scans:
            self.rows |= scan.rows

    def sources(self, row: ScanRow) -> list[Node]:
        scan = self._scans[row.scan]
        nodes = (scan.node(atom) for atom in operands(scan.maker[row.var]))
        return [node for node in nodes if node is not None]

    def is_cheap(self, row: ScanRow) -> bool:
        scan = self._scans[row.scan]
        maker = scan.maker.get(row.var)
        return maker is not None and row.var not in scan.choices and is_cheaper_than_memory(maker)

    def nbytes(self, row: ScanRow) -> int:
        """Returns the bytes of the row's stack: of its values in all iterations."""
        return to_aval(row.var).nbytes * self._scans[row.scan].length

    def keeping(self, forward: Eqns, backward: Eqns, kept: Collection[Node]) -> tuple[list, list]:
        """Rewrites the forward to stack the rows among ``kept``, and the backward to read these stacks."""
        stacks: dict[ScanRow, Var] = {}
        replaced: dict[int, JaxprEqn] = {}
        for scan in self._scans:
            replaced[id(scan.eqn)], new_stacks = scan.keeping(kept)
            stacks |= new_stacks
        new_forward = [replaced.get(id(eqn), eqn) for eqn in forward]
        return new_forward, [self._reading(eqn, stacks) for eqn in backward]

    def _reading(self, eqn: JaxprEqn, stacks: Mapping[ScanRow, Var]) -> JaxprEqn:
        """Rewrites an equation of the backward to recompute the rows that it reads from the kept stacks."""
        read = {var: self.rows[var] for var in operands(eqn) if var in self.rows}
        if all(stacks.get(row) is var for var, row in read.items()):
            return eqn
        again = _Again()
        for scan in self._scans:
            again.add(scan, [row.var for row in read.values() if row.scan == scan.number], stacks)
        reader = Scan.of(eqn)
        body = reader.body
        renamed: dict[Var, Atom] = {
            inner: again.names[read[outer]]
            for inner, outer in reader.operands(reader.xs).items()
            if isinstance(outer, Var) and outer in read
        }
        eqns = [*again.eqns, *(substitute(inner, renamed) for inner in body.eqns)]
        new = with_eqns(body, eqns, outvars=[lookup(atom, renamed) for atom in body.outvars])
        results = {i for i, var in enumerate(eqn.outvars) if i < reader.num_carry or not is_dropped(var)}
        changed = dataclasses.replace(reader, body=new)
        return changed.part(eqns, results, extra_inputs=again.stacked, extra_constants=again.constants)[0]


class _ForwardScan:
    """A scan of a forward.

    Attributes:
      maker: for each variable of the scan's body, the equation that defines it.
      rows: for each result of the scan that is only read row by row, the body's variable that is stacked.
      constants: for variables of the body that are equal in all iterations, the variables outside of the
        scan.
      stacked: for variables of the body, the stacks outside of the scan that have a row for each iteration.
    """

    def __init__(self, number: int, eqn: JaxprEqn, by_rows: Set[Var]):
        self.number = number
        self.eqn = eqn
        self._scan = scan = Scan.of(eqn)
        self.maker = makers_of(scan.body.eqns)
        self.choices = choices_in(scan.body.eqns)
        self.constants = scan.operands(scan.consts)
        self.stacked = scan.operands(scan.xs)
        for var, atom in scan.stacked:
            if isinstance(atom, Var) and var not in by_rows and not is_dropped(var):
                self.stacked.setdefault(atom, var)
        self.rows = {
            var: node
            for var, atom in scan.stacked
            if var in by_rows and isinstance(node := self.node(atom), ScanRow)
        }

    @property
    def length(self) -> int:
        return self._scan.length

    def node(self, atom: Atom) -> Node | None:
        """The node of a value of the body: a variable outside, a row, or ``None`` for a literal."""
        if not isinstance(atom, Var):
            return None
        outside = self.constants.get(atom, self.stacked.get(atom, ScanRow(self.number, atom)))
        return outside if isinstance(outside, Var | ScanRow) else None

    def keeping(self, kept: Collection[Node]) -> tuple[JaxprEqn, dict[ScanRow, Var]]:
        """Returns the scan that stacks the rows among ``kept`` and all that is read whole; and the stacks."""
        carry = self._scan.body.invars[self._scan.carry]
        rows = [row for var in (*carry, *self.maker) if (row := ScanRow(self.number, var)) in kept]
        named: dict[ScanRow, Var] = {}
        for var, row in self.rows.items():
            if row in rows:
                named.setdefault(row, var)
        if set(named.values()) == set(self.rows):
            return self.eqn, named
        new = [row for row in rows if row not in named]
        results = {
            i
            for i, var in enumerate(self.eqn.outvars)
            if i < self._scan.num_carry
            or (named.get(self.rows[var]) is var if var in self.rows else not is_dropped(var))
        }
        body = self._scan.body
        eqns = needed_eqns(body.eqns, [*(body.outvars[i] for i in results), *(row.var for row in new)])
        part, stacks = self._scan.part(eqns, results, extra_outputs=[row.var for row in new])
        return part, named | dict(zip(new, stacks, strict=True))

    def making(self, values: Iterable[Var], is_there: Collection[Var]) -> list[JaxprEqn]:
        missing = [var for var in values if var not in is_there]
        return needed_eqns(self._scan.body.eqns, missing, is_there)


class _Again:
    """Equations of the bodies of forwards' scans, copied into a backward's scan with new variables.

    Attributes:
      names: for each recomputed row, its variable in the backward's body.
      stacked, constants: for the variables that the equations read, the stacks and the constants outside of
        the scan.
    """

    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self.names: dict[ScanRow, Var] = {}
        self.stacked: dict[Var, Atom] = {}
        self.constants: dict[Var, Atom] = {}

    def add(self, scan: _ForwardScan, values: Sequence[Var], stacks: Mapping[ScanRow, Var]) -> None:
        kept = {row.var: var for row, var in stacks.items() if row.scan == scan.number}
        eqns = scan.making(values, {*kept, *scan.constants, *scan.stacked})
        renamed: dict[Var, Var] = {}
        for var in dict.fromkeys([*free_variables(eqns), *(var for var in values if var in kept)]):
            renamed[var] = new = Var(var.aval)
            if var in scan.constants:
                self.constants[new] = scan.constants[var]
            else:
                self.stacked[new] = kept[var] if var in kept else scan.stacked[var]
        for eqn in eqns:
            outvars = [Var(var.aval) for var in eqn.outvars]
            self.eqns.append(substitute(eqn, renamed).replace(outvars=outvars))
            for var, new in zip(eqn.outvars, outvars, strict=True):
                renamed.setdefault(var, new)
        self.names |= {ScanRow(scan.number, var): renamed[var] for var in values}


def _read_by_rows(eqns: Eqns) -> set[Var]:
    by_rows: set[Var] = set()
    otherwise: set[Var] = set()
    for eqn in eqns:
        read = operands(eqn)
        if _is_pure_scan(eqn):
            xs = eqn.invars[Scan.of(eqn).xs]
            by_rows.update(variables(xs))
            read = variables(eqn.invars[: -len(xs) or None])
        otherwise.update(read)
    return by_rows - otherwise


def _is_pure_scan(eqn: JaxprEqn) -> bool:
    return eqn.primitive is scan_p and not eqn.effects

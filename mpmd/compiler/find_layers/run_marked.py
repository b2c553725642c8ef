"""Runs a function with marks between its layers, and with layers under ``jax.checkpoint``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.find_layers.crossing import Crossing
from mpmd.compiler.find_layers.find_layers import OPERATIONS_PER_BYTE, LayerEnd
from mpmd.compiler.find_layers.open_function import OpenFunction, Rematerialised
from mpmd.compiler.find_layers.rematerialised import rematerialised
from mpmd.compiler.find_layers.run_scan import marked_values, run_scan
from mpmd.compiler.jaxprs.equations import (
    Atom,
    closed,
    free_variables,
    is_dropped,
    is_remat,
    make_jaxpr,
    operands,
)
from mpmd.compiler.jaxprs.work import WorkOf
from mpmd.language.annotate import Boundary
from mpmd.language.remat import Remat


def run_marked(
    function: OpenFunction,
    crossing: Crossing,
    arguments: Sequence[Any],
    stage_ends: Mapping[LayerEnd, str],
    remat: Mapping[LayerEnd, Remat] | None = None,
) -> list[Any]:
    """Runs a function with marks at the ends of its stages, and returns the results.

    Values that pass the end of a stage are marked, except for values that their readers can compute from
    inputs. The first reader computes such a value, and each function under ``jax.checkpoint`` that reads
    the value computes it again.

    Args:
      arguments: the values of the inputs.
      stage_ends: the ends of layers at which stages end, in order, and their names.
      remat: the policies by the ends of layers, for all layers that are put under ``jax.checkpoint`` unless
        they already are, and for the layers before and behind these. Iterations of a scan that have
        different policies become scans of their own.
    """
    return _Run(function, crossing, arguments, stage_ends, remat or {}).results()


class _Run:
    def __init__(
        self,
        function: OpenFunction,
        crossing: Crossing,
        arguments: Sequence[Any],
        stage_ends: Mapping[LayerEnd, str],
        remat: Mapping[LayerEnd, Remat],
    ):
        self._jaxpr = jaxpr = function.jaxpr
        self._opened_remat = function.remat
        self._crossing = crossing
        self._stage_ends = stage_ends
        self._remat = remat
        self._values: dict[Var, Any] = dict(function.constants)
        self._values.update(zip(jaxpr.invars, arguments, strict=True))
        self._position = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        self._last_read = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in operands(eqn)}
        self._last_read.update((atom, len(jaxpr.eqns)) for atom in jaxpr.outvars if isinstance(atom, Var))

    def results(self) -> list[Any]:
        for start, stop in itertools.pairwise(self._edges()):
            if name := self._stage_ends.get(LayerEnd(start)):
                self._mark(start, name)
            self._run(start, stop)
        return self._read(self._jaxpr.outvars)

    def _edges(self) -> list[int]:
        """The positions where a stage, a function under ``jax.checkpoint`` or a cut scan begins or ends."""
        count = len(self._jaxpr.eqns)
        edges = {0, count}
        for end in (*self._stage_ends, *self._remat):
            edges |= {end.equation, end.equation + bool(end.iterations)}
        edges |= {i for i in range(1, count) if self._opened_remat[i] is not self._opened_remat[i - 1]}
        return sorted(edges)

    def _mark(self, position: int, name: str) -> None:
        handed_over = self._crossing.at(position)
        boundary = Boundary(None, by_auto_marks=True, ends=(name,))
        marked = marked_values([self._values[var] for var in handed_over], boundary)
        self._values.update(zip(handed_over, marked, strict=True))

    def _run(self, start: int, stop: int) -> None:
        eqns = self._jaxpr.eqns[start:stop]
        of_layers = [eqn for eqn in eqns if not any(var in self._crossing.from_inputs for var in eqn.outvars)]
        if not of_layers:
            return
        opened = self._opened_remat[start]
        is_open = opened is None and self._remat and not _are_rematerialised(of_layers)
        within = [end for end in (*self._stage_ends, *self._remat) if end.equation == start]
        if any(end.iterations for end in within):
            (scan,) = of_layers
            ends = {
                end.iterations: name
                for end, name in self._stage_ends.items()
                if end.equation == start and end.iterations
            }
            ranges = self._ranges(scan, start) if is_open else [(scan.params["length"], Remat.NONE)]
            results = run_scan(scan, self._read(scan.invars), ends, ranges, opened)
            self._values.update(zip(scan.outvars, results, strict=True))
            return
        read_later = [var for eqn in of_layers for var in eqn.outvars if self._last_read.get(var, -1) >= stop]
        policy = self._policy(LayerEnd(stop)) if is_open else Remat.NONE
        if opened is None and policy is Remat.NONE:
            self._evaluate(of_layers, read_later)
        else:
            makers = self._makers(free_variables(of_layers))
            self._evaluate([*makers, *of_layers], read_later, policy, opened)

    def _policy(self, end: LayerEnd) -> Remat:
        """The policy of the layer that contains the equations before ``end``."""
        return self._remat[min(other for other in self._remat if other >= end)]

    def _ranges(self, scan: JaxprEqn, position: int) -> list[tuple[int, Remat]]:
        """The policies of the iterations of a scan, each with the iteration behind the last one."""
        length = scan.params["length"]
        policies = [self._policy(LayerEnd(position, done)) for done in range(1, length)]
        policies.append(self._policy(LayerEnd(position + 1)))
        changes = (i for i in range(1, length) if policies[i] is not policies[i - 1])
        return [(stop, policies[stop - 1]) for stop in (*changes, length)]

    def _evaluate(
        self,
        eqns: Sequence[JaxprEqn],
        results: Sequence[Var],
        policy: Remat = Remat.NONE,
        opened: Rematerialised | None = None,
    ) -> None:
        """Runs equations, for the values of some variables."""
        read = free_variables(eqns)
        run = rematerialised(closed(make_jaxpr(read, eqns, results)), policy)
        if opened is not None:
            run = jax.checkpoint(run, policy=opened.policy, prevent_cse=opened.prevent_cse)
        self._values.update(zip(results, run(*self._read(read)), strict=True))

    def _read(self, atoms: Sequence[Atom]) -> list[Any]:
        """The values of variables and literals."""
        missing = [atom for atom in atoms if isinstance(atom, Var) and atom not in self._values]
        if missing:
            makers = [eqn for eqn in self._makers(missing) if eqn.outvars[0] not in self._values]
            self._evaluate(makers, [var for eqn in makers for var in eqn.outvars if not is_dropped(var)])
        return [self._values[atom] if isinstance(atom, Var) else atom.val for atom in atoms]

    def _makers(self, variables: Iterable[Var]) -> list[JaxprEqn]:
        """The equations that compute variables from inputs, in their order."""
        makers: dict[int, JaxprEqn] = {}
        pending = list(variables)
        while pending:
            eqn = self._crossing.from_inputs.get(pending.pop())
            if eqn is not None and id(eqn) not in makers:
                makers[id(eqn)] = eqn
                pending += operands(eqn)
        return sorted(makers.values(), key=lambda eqn: self._position[id(eqn)])


def _are_rematerialised(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether most of the work is under ``jax.checkpoint`` already: a layer is not to be computed thrice."""
    work_of = WorkOf(OPERATIONS_PER_BYTE)

    def again(eqn: JaxprEqn) -> float:
        if eqn.primitive.name == "scan":
            return eqn.params["length"] * sum(map(again, eqn.params["jaxpr"].jaxpr.eqns))
        return work_of.equation(eqn) if is_remat(eqn) else 0.0

    return sum(map(again, eqns)) > sum(map(work_of.equation, eqns)) / 2

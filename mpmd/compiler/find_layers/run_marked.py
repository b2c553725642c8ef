"""Runs a function with marks between its layers, and with layers under ``jax.checkpoint``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from mpmd.compiler.find_layers.crossing import Crossing
from mpmd.compiler.find_layers.find_layers import OPERATIONS_PER_BYTE, LayerEnd
from mpmd.compiler.find_layers.open_function import OpenFunction, Rematerialised
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    closed,
    free_variables,
    is_dropped,
    is_remat,
    make_jaxpr,
    operands,
)
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.compiler.jaxprs.work import WorkOf
from mpmd.language.annotate import Boundary, mark_p


def run_marked(
    function: OpenFunction,
    crossing: Crossing,
    arguments: Sequence[Any],
    stage_ends: Mapping[LayerEnd, str],
    remat_ends: Sequence[LayerEnd] | None = None,
) -> list[Any]:
    """The results of a function whose stages end with some layers.

    Values that are handed over there are marked, except for those that readers can compute from inputs. These
    are computed where they are read first, and again by each function under ``jax.checkpoint`` that reads
    them.

    Args:
      arguments: values of the inputs.
      stage_ends: the ends of layers at which stages end, in order, and their names.
      remat_ends: the ends of parts that are put under ``jax.checkpoint``, unless they are already; ``None``:
        no part is.
    """
    return _Run(function, crossing, arguments, stage_ends, remat_ends).results()


class _Run:
    def __init__(
        self,
        function: OpenFunction,
        crossing: Crossing,
        arguments: Sequence[Any],
        stage_ends: Mapping[LayerEnd, str],
        remat_ends: Sequence[LayerEnd] | None,
    ):
        self._jaxpr = jaxpr = function.jaxpr
        self._remat = function.remat
        self._crossing = crossing
        self._stage_ends = stage_ends
        self._remat_ends = remat_ends
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
        for end in (*self._stage_ends, *(self._remat_ends or ())):
            edges |= {end.equation, end.equation + bool(end.iterations)}
        edges |= {i for i in range(1, count) if self._remat[i] is not self._remat[i - 1]}
        return sorted(edges)

    def _mark(self, position: int, name: str) -> None:
        handed_over = self._crossing.at(position)
        boundary = Boundary(None, by_auto_marks=True, ends=(name,))
        marked = _marked([self._values[var] for var in handed_over], boundary)
        self._values.update(zip(handed_over, marked, strict=True))

    def _run(self, start: int, stop: int) -> None:
        eqns = self._jaxpr.eqns[start:stop]
        of_layers = [eqn for eqn in eqns if not any(var in self._crossing.from_inputs for var in eqn.outvars)]
        if not of_layers:
            return
        remat = self._remat[start]
        if remat is None and self._remat_ends is not None and not _are_rematerialised(of_layers):
            remat = Rematerialised(policy=None, prevent_cse=True)
        within = [end for end in (*self._stage_ends, *(self._remat_ends or ())) if end.equation == start]
        if any(end.iterations for end in within):
            (scan,) = of_layers
            ends = {
                end.iterations: name
                for end, name in self._stage_ends.items()
                if end.equation == start and end.iterations
            }
            results = _run_scan(scan, self._read(scan.invars), ends, remat)
            self._values.update(zip(scan.outvars, results, strict=True))
            return
        read_later = [var for eqn in of_layers for var in eqn.outvars if self._last_read.get(var, -1) >= stop]
        if remat is None:
            self._evaluate(of_layers, read_later)
        else:
            makers = self._makers(free_variables(of_layers))
            self._evaluate([*makers, *of_layers], read_later, remat)

    def _evaluate(
        self, eqns: Sequence[JaxprEqn], results: Sequence[Var], remat: Rematerialised | None = None
    ) -> None:
        """Runs equations, for the values of some variables."""
        read = free_variables(eqns)
        run = jaxpr_as_fun(closed(make_jaxpr(read, eqns, results)))
        if remat is not None:
            run = jax.checkpoint(run, policy=remat.policy, prevent_cse=remat.prevent_cse)
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


def _run_scan(
    eqn: JaxprEqn, values: Sequence[Any], ends: Mapping[int, str], remat: Rematerialised | None
) -> list[Any]:
    """The results of a scan over layers.

    Args:
      ends: the iterations after which stages end, in order, and the names of these ends.
    """
    roles, params = scan_operands(eqn), eqn.params
    consts, initial, xs = (list(values[part]) for part in (roles.consts, roles.carry, roles.xs))
    body = jaxpr_as_fun(params["jaxpr"])
    if remat is not None:
        body = jax.checkpoint(body, policy=remat.policy, prevent_cse=False)
    carried = _handed_over(params["jaxpr"].jaxpr, roles.carry)
    every = tuple(b - a for a, b in itertools.pairwise([0, *ends]))
    boundary = Boundary(None, every=every, has_rest=True, by_auto_marks=True, ends=tuple(ends.values()))

    def one(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(body(*consts, *carry, *x))
        if ends:
            marked = _marked([results[i] for i in carried], boundary)
            for i, value in zip(carried, marked, strict=True):
                results[i] = value
        return results[: len(carry)], results[len(carry) :]

    after, stacked = lax.scan(one, initial, xs, params["length"], params["reverse"], params["unroll"])
    return [*after, *stacked]


def _handed_over(body: Jaxpr, carry: slice) -> list[int]:
    """The positions of carried values that depend on carried floats: no counters, and no unchanged values."""
    before = body.invars[carry]
    changed = [i for i, var in enumerate(before) if body.outvars[i] is not var]
    reached = {before[i] for i in changed if jnp.issubdtype(aval_of(before[i]).dtype, jnp.inexact)}
    for eqn in body.eqns:
        if any(var in reached for var in operands(eqn)):
            reached.update(eqn.outvars)
    return [i for i in changed if body.outvars[i] in reached]


def _marked(values: Sequence[Any], boundary: Boundary) -> list[Any]:
    return mark_p.bind(*values, boundary=boundary, forward=True, linear=False)

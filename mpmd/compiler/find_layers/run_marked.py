"""Runs a function with marks between its layers, and with layers under ``jax.checkpoint``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpmd.compiler.cut_scans import cut_scan
from mpmd.compiler.find_layers.crossing import Crossing
from mpmd.compiler.find_layers.find_layers import LayerEnd
from mpmd.compiler.find_layers.open_function import OpenFunction, RematOptions, under_remat
from mpmd.compiler.jaxprs.equations import (
    Atom,
    closed,
    dependents,
    free_variables,
    is_among,
    is_dropped,
    is_inexact,
    is_remat,
    make_jaxpr,
    needed_eqns,
    operands,
    shape_of,
    variables,
)
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.work import WorkOf
from mpmd.language.annotate import Boundary, bind_mark
from mpmd.language.decisions import is_planned
from mpmd.sharding import described


class MarkedRun:
    """A run of a function with marks at the ends of its stages.

    Values that pass the end of a stage are marked, except for values that their readers can compute from
    inputs. The first reader computes such a value, and each function under ``jax.checkpoint`` that reads
    the value computes it again.
    """

    def __init__(
        self,
        function: OpenFunction,
        crossing: Crossing,
        arguments: Sequence[Any],
        stage_ends: Mapping[LayerEnd, str],
        remat: Mapping[LayerEnd, RematOptions | None],
    ):
        """
        Args:
          arguments: the values of the inputs.
          stage_ends: the ends of layers at which stages end, in order, and their names.
          remat: the options by the ends of layers, for all layers that are put under ``jax.checkpoint``
            unless they already are, and ``None`` for the layers before and behind these. Iterations of a
            scan that have different policies become scans of their own.
        """
        self._jaxpr = jaxpr = function.jaxpr
        self._opened_remat = function.remat
        self._crossing = crossing
        self._stage_ends = stage_ends
        self._remat = remat
        self._runs: dict[Hashable, Callable] = {}
        self._values: dict[Var, Any] = dict(function.constants)
        self._values.update(zip(jaxpr.invars, arguments, strict=True))
        self._from_inputs = [*dict.fromkeys(crossing.from_inputs.values())]
        self._last_read = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in operands(eqn)}
        self._last_read.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))

    def results(self) -> list[Any]:
        for start, stop in itertools.pairwise(self._edges()):
            if name := self._stage_ends.get(LayerEnd(start)):
                self._mark(start, name)
            self._run(start, stop)
        return self._read(self._jaxpr.outvars)

    def _edges(self) -> list[int]:
        count = len(self._jaxpr.eqns)
        edges = {0, count}
        for end in (*self._stage_ends, *self._remat):
            edges |= {end.equation, end.equation + bool(end.iterations)}
        edges |= {i for i in range(1, count) if self._opened_remat[i] is not self._opened_remat[i - 1]}
        return sorted(edges)

    def _mark(self, position: int, name: str) -> None:
        handed_over = self._crossing.at(position)
        marked = bind_mark([self._values[var] for var in handed_over], _boundary(name))
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
            ranges = self._ranges(scan, start) if is_open else [(scan.params["length"], opened)]
            self._run_scan(scan, start, ranges)
            return
        read_later = [var for eqn in of_layers for var in eqn.outvars if self._last_read.get(var, -1) >= stop]
        options = self._options_of_layer(LayerEnd(stop)) if is_open else opened
        makers = needed_eqns(self._from_inputs, free_variables(of_layers)) if options else []
        self._evaluate([*makers, *of_layers], read_later, options)

    def _run_scan(
        self, eqn: JaxprEqn, position: int, ranges: Sequence[tuple[int, RematOptions | None]]
    ) -> None:
        """Runs a scan over layers with marks at the ends of stages.

        Args:
          ranges: the options of iterations, each with the iteration behind the last one.
        """
        boundaries = {
            end.iterations: _boundary(name)
            for end, name in self._stage_ends.items()
            if end.equation == position and end.iterations
        }
        bodies = {options: _under(eqn.params["jaxpr"], options) for _, options in ranges}
        of_ranges = [(stop, bodies[options]) for stop, options in ranges]
        handed_over = _handed_over(Scan.of(eqn))
        results = cut_scan(eqn.params, self._read(eqn.invars), handed_over, boundaries, of_ranges)
        self._values.update(zip(eqn.outvars, results, strict=True))

    def _options_of_layer(self, end: LayerEnd) -> RematOptions | None:
        return self._remat[min(other for other in self._remat if other >= end)]

    def _ranges(self, scan: JaxprEqn, position: int) -> list[tuple[int, RematOptions | None]]:
        length = scan.params["length"]
        ends = (*(LayerEnd(position, done) for done in range(1, length)), LayerEnd(position + 1))
        groups = itertools.groupby(enumerate(map(self._options_of_layer, ends), 1), key=lambda each: each[1])
        return [(max(stop for stop, _ in group), options) for options, group in groups]

    def _evaluate(
        self, eqns: Sequence[JaxprEqn], results: Sequence[Var], options: RematOptions | None = None
    ) -> None:
        read = free_variables(eqns)
        jaxpr = make_jaxpr(read, eqns, results)
        run = self._function(jaxpr, options)
        self._values.update(zip(results, run(*self._read(read)), strict=True))

    def _function(self, jaxpr: Jaxpr, options: RematOptions | None) -> Callable:
        """While a step is planned, a ``jit`` of all equal layers, which JAX differentiates once."""
        if not is_planned():
            return under_remat(closed(jaxpr), options)
        key = options, *_structure(jaxpr)
        if key not in self._runs:
            self._runs[key] = jax.jit(under_remat(closed(jaxpr), options))
        return self._runs[key]

    def _read(self, atoms: Sequence[Atom]) -> list[Any]:
        missing = [var for var in variables(atoms) if var not in self._values]
        if missing:
            makers = needed_eqns(self._from_inputs, missing, given=self._values)
            self._evaluate(makers, [var for eqn in makers for var in eqn.outvars if not is_dropped(var)])
        return [self._values[atom] if isinstance(atom, Var) else atom.val for atom in atoms]


def _structure(jaxpr: Jaxpr) -> Iterator[Hashable]:
    """Yields all of a jaxpr but the identity of its variables.

    Layers with equal structures also have equal lines and rules of differentiation, of which executables know
    nothing (``lower/fingerprint.py``).
    """
    numbers: dict[Var, int] = {}

    def of(value: Any) -> Hashable:
        if isinstance(value, Var):
            return numbers.setdefault(value, len(numbers)), value.aval
        if isinstance(value, Literal):
            return value.aval, id(value.val) if shape_of(value) else str(value.val)
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    yield from map(of, (*jaxpr.invars, *jaxpr.outvars))
    for eqn in jaxpr.eqns:
        info = eqn.source_info
        yield eqn.primitive, eqn.ctx, info.traceback, info.name_stack
        yield from map(of, (*eqn.invars, *eqn.outvars, *eqn.params, *eqn.params.values()))


def _are_rematerialised(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether most of the work is under ``jax.checkpoint`` already: a layer is not to be computed thrice."""
    work_of = WorkOf()

    def again(eqn: JaxprEqn) -> float:
        if eqn.primitive.name == "scan":
            return eqn.params["length"] * sum(map(again, eqn.params["jaxpr"].jaxpr.eqns))
        return work_of.equation(eqn) if is_remat(eqn) else 0.0

    return sum(map(again, eqns)) > sum(map(work_of.equation, eqns)) / 2


def _boundary(name: str) -> Boundary:
    return Boundary(None, by_auto_marks=True, ends=(name,))


def _under(body: ClosedJaxpr, options: RematOptions | None) -> ClosedJaxpr:
    if options is None:
        return body
    run = under_remat(body, dataclasses.replace(options, prevent_cse=False))
    return jax.make_jaxpr(run)(*map(described, body.in_avals))


def _handed_over(scan: Scan) -> list[int]:
    """The positions of carried values that depend on carried floats: no counters, and no unchanged values."""
    changed = {i: before for i, (before, after) in enumerate(scan.carried) if after is not before}
    reached = dependents(scan.body.eqns, filter(is_inexact, changed.values()))
    return [i for i in changed if is_among(scan.body.outvars[i], reached)]

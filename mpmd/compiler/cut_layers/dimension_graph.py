"""Goes through a step and finds which dimensions are the same, and where scans over layers cut them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.concat_and_slice import concats_and_slices
from mpmd.compiler.cut_layers.layer_dimensions import LayerDimensions
from mpmd.compiler.cut_scans.layer_ranges import layers_p
from mpmd.compiler.jaxprs.equations import shape_of, variables
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.compiler.jaxprs.rules import exact_dimensions
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.stack import Stack
from mpmd.language.reduce import treduce_p


class DimensionGraph:
    """The dimensions of a step: which are the same, and where they are cut. Scans outside of other scans have
    one, too: their iterations."""

    def __init__(self, jaxpr: Jaxpr, seeds: Iterable[tuple[Var, Stack]]):
        """
        Args:
          seeds: values that are in layer ranges already, each with its stack.
        """
        self.dimensions = LayerDimensions()
        self._walk(jaxpr.eqns)
        for var, stack in seeds:
            ends = itertools.accumulate(stack.sizes)
            self.dimensions.cut((var, stack.axis), shape_of(var)[stack.axis], ends)
        self.dimensions.spread()

    def sizes(self, eqn: JaxprEqn) -> tuple[int, ...] | None:
        is_scan = eqn.primitive.name == "scan"
        return self.dimensions.sizes((id(eqn), 0), eqn.params["length"]) if is_scan else None

    def touches_ranges(self, eqn: JaxprEqn) -> bool:
        return any(map(self.dimensions.stack, (*eqn.invars, *eqn.outvars)))

    def _walk(self, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            if eqn.primitive.name == "scan":
                self._scan(eqn)
            elif eqn.primitive is treduce_p:
                self._loop(eqn)
            elif eqn.primitive.name == "cond":
                self._cond(eqn)
            else:
                self._equation(eqn)

    def _scan(self, eqn: JaxprEqn) -> None:
        scan = Scan.of(eqn)
        stacked = variables([*eqn.invars[scan.xs], *(var for var, _ in scan.stacked)])
        self.dimensions.join([(id(eqn), 0), *((var, 0) for var in stacked)])
        self._equation(eqn)

    def _loop(self, eqn: JaxprEqn) -> None:
        body: Jaxpr = eqn.params["body"]
        outer = closed_over(eqn)
        state_vars = iter(body.invars[len(outer) + 1 :])
        states = [None if is_sum else next(state_vars) for is_sum in eqn.params["summed"]]
        self.dimensions.join_all(outer.items())
        for values in (eqn.invars[len(outer) :], body.outvars, states):
            self.dimensions.join_all(zip(values, eqn.outvars, strict=True))
        self._walk(body.eqns)

    def _cond(self, eqn: JaxprEqn) -> None:
        for branch in eqn.params["branches"]:
            self.dimensions.join_all(zip(branch.jaxpr.invars, eqn.invars[1:], strict=True))
            self.dimensions.join_all(zip(branch.jaxpr.outvars, eqn.outvars, strict=True))
            self._walk(branch.jaxpr.eqns)

    def _equation(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "optimization_barrier":
            self.dimensions.join_all(zip(eqn.invars, eqn.outvars, strict=True))
            return
        if eqn.primitive is layers_p:
            axis, sizes = eqn.params["axis"], eqn.params["sizes"]
            self.dimensions.cut((eqn.outvars[0], axis), sum(sizes), itertools.accumulate(sizes))
        for dimension in exact_dimensions(eqn):
            self.dimensions.join(dimension.of_variables(eqn))
        reverses = eqn.primitive.name == "rev"
        for relation in concats_and_slices(eqn):
            whole, dim = relation.whole, relation.dim
            for part, start, _ in relation.members if relation.have_dim else ():
                if isinstance(part, Var) and isinstance(whole, Var):
                    self.dimensions.add_inclusion((whole, dim), (part, dim), start, reverses)

"""Goes through a step and finds which dimensions are the same, and where scans over layers cut them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.concat_and_slice import concats_and_slices
from mpmd.compiler.cut_layers.layer_dimensions import LayerDimensions
from mpmd.compiler.cut_scans.layer_ranges import layers_p
from mpmd.compiler.jaxprs.equations import Atom, aval_of
from mpmd.compiler.jaxprs.rules import exact_dimensions
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.stack import Stack
from mpmd.language.reduce import treduce_p


@dataclasses.dataclass(frozen=True)
class DimensionGraph:
    """The dimensions of a step: which are the same, and where they are cut.

    Attributes:
      scans: its scans outside of other scans, by the ``id`` of their equations.
    """

    dimensions: LayerDimensions
    scans: Mapping[int, Scan]

    def sizes(self, scan: Scan) -> tuple[int, ...] | None:
        """The parts into which a scan is cut; ``None`` for one that stays whole."""
        return self.dimensions.sizes((id(scan.eqn), 0), scan.length)


def dimension_graph(jaxpr: Jaxpr, seeds: Sequence[tuple[Var, Stack]]) -> DimensionGraph:
    """The dimensions of a step.

    Args:
      seeds: values that are in parts already, and how.
    """
    maker = _GraphMaker()
    maker.walk(jaxpr.eqns)
    for var, stack in seeds:
        ends = itertools.accumulate(stack.sizes)
        maker.dimensions.cut((var, stack.axis), aval_of(var).shape[stack.axis], ends)
    maker.dimensions.spread()
    return DimensionGraph(maker.dimensions, maker.scans)


class _GraphMaker:
    """Collects what equations say."""

    def __init__(self) -> None:
        self.dimensions = LayerDimensions()
        self.scans: dict[int, Scan] = {}

    def walk(self, eqns: Iterable[JaxprEqn]) -> None:
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
        scan = self.scans[id(eqn)] = Scan.of(eqn)
        stacked = [*eqn.invars[scan.xs], *(var for var, _ in scan.stacked)]
        self.dimensions.join([(id(eqn), 0), *((atom, 0) for atom in stacked if isinstance(atom, Var))])
        self._equation(eqn)

    def _loop(self, eqn: JaxprEqn) -> None:
        body: Jaxpr = eqn.params["body"]
        closed_over, states, inner_states = loop_operands(eqn)
        self._join(zip(body.invars, closed_over, strict=False))
        self._join(zip(states, eqn.outvars, strict=True))
        self._join(zip(body.outvars, eqn.outvars, strict=True))
        for state, result in zip(inner_states, eqn.outvars, strict=True):
            if state is not None:
                self.dimensions.join_all(state, result)
        self.walk(body.eqns)

    def _cond(self, eqn: JaxprEqn) -> None:
        for branch in eqn.params["branches"]:
            self._join(zip(branch.jaxpr.invars, eqn.invars[1:], strict=True))
            self._join(zip(branch.jaxpr.outvars, eqn.outvars, strict=True))
            self.walk(branch.jaxpr.eqns)

    def _join(self, pairs: Iterable[tuple[Atom, Atom]]) -> None:
        for a, b in pairs:
            self.dimensions.join_all(a, b)

    def _equation(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "optimization_barrier":
            self._join(zip(eqn.invars, eqn.outvars, strict=True))
            return
        if eqn.primitive is layers_p:
            axis, sizes = eqn.params["axis"], eqn.params["sizes"]
            node = next(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var))
            self.dimensions.cut((node, axis), sum(sizes), itertools.accumulate(sizes))
        for dimension in exact_dimensions(eqn):
            self.dimensions.join(dimension.of_variables(eqn))
        for relation in concats_and_slices(eqn):
            for member in relation.members:
                if member.has_dim and isinstance(member.atom, Var) and isinstance(relation.whole, Var):
                    whole, part = (relation.whole, relation.dim), (member.atom, relation.dim)
                    self.dimensions.add_inclusion(whole, part, member.start, relation.reverses)


def loop_operands(eqn: JaxprEqn) -> tuple[list[Atom], list[Atom], list[Var | None]]:
    """Returns the operands of a loop that its body closes over, its initial states, and the states in the
    body.

    A plain sum has no state in the body.
    """
    body: Jaxpr = eqn.params["body"]
    closed_over = len(eqn.invars) - len(eqn.outvars)
    state_vars = iter(body.invars[closed_over + 1 :])
    inner = [None if is_sum else next(state_vars) for is_sum in eqn.params["summed"]]
    return list(eqn.invars[:closed_over]), list(eqn.invars[closed_over:]), inner

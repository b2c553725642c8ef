"""Cuts scans over layers at their marks, and the arrays that they scan over into parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.dimension_graph import DimensionGraph, dimension_graph
from mpmd.compiler.cut_layers.rewrite import Rewriter
from mpmd.compiler.cut_layers.scans_over_data import warn_of_scans_over_data
from mpmd.compiler.cut_layers.values import Gathered, Values
from mpmd.compiler.cut_scans import check_index_loops, layers_p
from mpmd.compiler.jaxprs.bodies import in_loops, with_remat_open
from mpmd.compiler.jaxprs.equations import Atom, contains, is_remat, with_eqns
from mpmd.compiler.jaxprs.live import live_jaxpr
from mpmd.compiler.jaxprs.marks import has_mark, without_identities
from mpmd.errors import PerformanceWarning
from mpmd.ir.stack import Stack
from mpmd.language.annotate import mark_of
from mpmd.language.reduce import treduce_p
from mpmd.util.warn import warn_user

Known = TypeVar("Known")


@dataclasses.dataclass(frozen=True)
class CutJaxpr:
    """The jaxpr of a step whose stacked values are in layer ranges.

    Attributes:
      jaxpr: takes the layer ranges of arguments and returns the layer ranges of results, in order.
      constants: the values of the variables that the jaxpr reads in addition to its arguments.
      argument_stacks, result_stacks: for each argument and result of the original step, its division into
        layer ranges; ``None`` for a whole value.
      origin: for each new variable, the variable of the original step of which it is a layer range or a
        partial result.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Any]
    argument_stacks: tuple[Stack | None, ...]
    result_stacks: tuple[Stack | None, ...]
    origin: Mapping[Var, Var]

    def of_ranges(self, known: Mapping[Var, Known]) -> dict[Var, Known]:
        """Copies facts about variables of the original step to the new variables that derive from these."""
        return {**known, **{new: known[var] for new, var in self.origin.items() if var in known}}


def cut_stacks(
    jaxpr: Jaxpr,
    constants: Mapping[Var, Any],
    fed_back: Sequence[tuple[int, int]],
    argument_stacks: Sequence[Stack | None] = (),
    result_stacks: Sequence[Stack | None] = (),
) -> CutJaxpr:
    """Cuts a step in canonical form.

    A scan with marks becomes a scan for each of its stages, with marks in between. The arrays that it scans
    over are divided into parts, and so are the arrays of the same layers: gradients, accumulators, an
    optimizer's moments.

    Args:
      constants: the values of the variables that the step reads besides its arguments.
      fed_back: pairs of an argument's and a result's position that a training loop will connect.
      argument_stacks, result_stacks: the division of arguments and results that already are in layer ranges.

    Raises: ``CompileError`` for marks that do not fit their scans, and for marked loops that take rows by a
      counter.
    Warns: ``PerformanceWarning`` for equations that put parts together; ``SharedWeightsWarning`` for marks in
      scans over data.
    """
    stacks_in_place = [
        *zip(jaxpr.invars, argument_stacks, strict=False),
        *zip(jaxpr.outvars, result_stacks, strict=False),
    ]
    seeds = [(atom, stack) for atom, stack in stacks_in_place if stack is not None and isinstance(atom, Var)]
    if not seeds and not contains(jaxpr, layers_p):
        whole = (None,) * len(jaxpr.invars), (None,) * len(jaxpr.outvars)
        return CutJaxpr(jaxpr, constants, *whole, origin={})
    jaxpr = _without_dead_code(jaxpr)
    check_index_loops(jaxpr, constants)
    warn_of_scans_over_data(jaxpr)
    while True:
        graph = dimension_graph(jaxpr, seeds)
        opened = _with_remat_open(jaxpr, graph)
        if opened is None:
            return _rewritten(jaxpr, constants, graph, fed_back, result_stacks)
        jaxpr = opened


def _without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The step without equations that nothing needs, of which nobody is to be warned; with all marks."""

    def live_body(body: Jaxpr) -> Jaxpr:
        return live_jaxpr(body, is_kept=lambda eqn: mark_of(eqn) is not None or has_mark(eqn))

    jaxpr = in_loops(jaxpr, live_body)
    return live_jaxpr(jaxpr, is_kept=lambda eqn: eqn.primitive is treduce_p)


def _without_notes(jaxpr: Jaxpr) -> Jaxpr:
    """The step without notes of layer ranges."""
    jaxpr = in_loops(jaxpr, lambda body: without_identities(body, layers_p))
    return without_identities(jaxpr, layers_p)


def _with_remat_open(jaxpr: Jaxpr, graph: DimensionGraph) -> Jaxpr | None:
    """The step with those rematerialised functions open that touch layer ranges; ``None`` without any."""

    def touches_ranges(eqn: JaxprEqn) -> bool:
        return any(graph.dimensions.stack(atom) for atom in (*eqn.invars, *eqn.outvars))

    if not any(is_remat(eqn) and touches_ranges(eqn) for eqn in _equations(jaxpr)):
        return None
    jaxpr = in_loops(jaxpr, lambda body: with_remat_open(body, touches_ranges))
    return with_remat_open(jaxpr, touches_ranges)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a step and of the bodies of its loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            yield from eqn.params["body"].eqns
        else:
            yield eqn


def _rewritten(
    jaxpr: Jaxpr,
    constants: Mapping[Var, Any],
    graph: DimensionGraph,
    fed_back: Sequence[tuple[int, int]],
    result_stacks: Sequence[Stack | None],
) -> CutJaxpr:
    """The step of the layer ranges.

    A result that takes the place of an argument is in the argument's parts, not the other way round: that it
    does so is a guess, by which nothing is cut.
    """
    gathered = Gathered()
    values = Values(graph.dimensions, gathered, origin={})
    ranges_of_constants: dict[Var, Any] = {}
    for var, value in constants.items():
        stack = values.planned(var)
        ranges = stack.cut(value) if stack else (value,)
        ranges_of_constants |= zip(values.bind(var), ranges, strict=True)
    invars = [new for var in jaxpr.invars for new in values.bind(var)]
    Rewriter(graph).add_all(values, jaxpr.eqns)
    argument_stacks = tuple(map(values.planned, jaxpr.invars))
    stacks = list(map(values.planned, jaxpr.outvars))
    for i, j in fed_back:
        stacks[j] = argument_stacks[i] or stacks[j]
    stacks = [asked or stack for asked, stack in itertools.zip_longest(result_stacks, stacks)]
    outvars: list[Atom] = []
    for atom, stack in zip(jaxpr.outvars, stacks, strict=True):
        outvars += values.as_planned(atom, stack)
    for message in gathered.messages():
        warn_user(message, PerformanceWarning)
    return CutJaxpr(
        jaxpr=_without_notes(with_eqns(jaxpr, values.eqns, invars=invars, outvars=outvars)),
        constants=ranges_of_constants,
        argument_stacks=argument_stacks,
        result_stacks=tuple(stacks),
        origin=values.origin,
    )

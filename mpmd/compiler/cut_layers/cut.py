"""Cuts scans over layers at their marks, and the arrays that they scan over into parts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.dimension_graph import DimensionGraph
from mpmd.compiler.cut_layers.rewrite import add_all
from mpmd.compiler.cut_layers.scans_over_data import warn_of_scans_over_data
from mpmd.compiler.cut_layers.values import Values
from mpmd.compiler.cut_scans import check_index_loops, layers_p
from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import Atom, contains, is_dropped, is_remat, with_eqns
from mpmd.compiler.jaxprs.marks import everywhere, has_mark, without_identities
from mpmd.compiler.jaxprs.remat import with_remat_open
from mpmd.errors import PerformanceWarning
from mpmd.ir.stack import Stack
from mpmd.language.annotate import mark_of
from mpmd.language.reduce import treduce_p
from mpmd.util.warn import warn_user


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
    # Nobody is to be warned of equations that nothing needs. Marks stay, to be counted.
    jaxpr = everywhere(jaxpr, _live)
    check_index_loops(jaxpr, constants)
    warn_of_scans_over_data(jaxpr)
    while True:
        graph = DimensionGraph(jaxpr, seeds)
        if not any(is_remat(eqn) and graph.touches_ranges(eqn) for eqn in _equations(jaxpr)):
            return _rewritten(jaxpr, constants, graph, fed_back, result_stacks)
        jaxpr = everywhere(jaxpr, functools.partial(with_remat_open, should_open=graph.touches_ranges))


def _live(jaxpr: Jaxpr) -> Jaxpr:
    kept = (eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p or mark_of(eqn) or has_mark(eqn))
    needed = [*jaxpr.outvars, *(var for eqn in kept for var in eqn.outvars if not is_dropped(var))]
    return with_eqns(jaxpr, live_eqns(jaxpr.eqns, needed))


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield from eqn.params["body"].eqns if eqn.primitive is treduce_p else [eqn]


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
    values = Values(graph, gathered={}, origin={})
    ranges_of_constants: dict[Var, Any] = {}
    for var, value in constants.items():
        stack = values.planned(var)
        ranges = stack.cut(value) if stack else (value,)
        ranges_of_constants |= zip(values.bind(var), ranges, strict=True)
    invars = [new for var in jaxpr.invars for new in values.bind(var)]
    add_all(values, jaxpr.eqns)
    argument_stacks = tuple(map(values.planned, jaxpr.invars))
    stacks = list(map(values.planned, jaxpr.outvars))
    for i, j in fed_back:
        stacks[j] = argument_stacks[i] or stacks[j]
    stacks = [asked or stack for asked, stack in itertools.zip_longest(result_stacks, stacks)]
    outvars: list[Atom] = []
    for atom, stack in zip(jaxpr.outvars, stacks, strict=True):
        outvars += values.as_planned(atom, stack)
    new = with_eqns(jaxpr, values.eqns, invars=invars, outvars=outvars)
    for message in values.gathered.values():
        warn_user(message, PerformanceWarning)
    return CutJaxpr(
        jaxpr=everywhere(new, lambda body: without_identities(body, layers_p)),
        constants=ranges_of_constants,
        argument_stacks=argument_stacks,
        result_stacks=tuple(stacks),
        origin=values.origin,
    )

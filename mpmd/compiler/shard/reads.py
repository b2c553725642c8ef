"""Finds the values from outside the loop that tasks do not read as wholes, such as the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import scan_p

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    is_among,
    is_index,
    is_remat,
    makers_of,
    operands,
    size,
)
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.language.per_group import per_group_p

Origins = Mapping[Var, frozenset[Var]]
"""For variables that depend on values of outside alone, these values."""


class LoopReads(NamedTuple):
    """Outer values of which a task or a device reads only a part.

    Attributes:
      by_index: the values of which a task reads the slice at the microbatch index: the batch.
      dimensions: for values of which a task reads whole microbatches, the dimension that counts microbatches.
        For values that a scan outside of the loop reads by iteration, the dimension that counts iterations:
        such a scan computes the loop's results to which no stage contributes.
      by_device: the values that a ``shard_map`` or an ``mpmd.per_group`` function reads, in which each device
        computes with its own shard.
    """

    by_index: set[Var]
    dimensions: dict[Var, int]
    by_device: set[Var]


def loop_reads(graph: TaskGraph) -> LoopReads:
    indices = {loop.index for loop in graph.step.loops}
    origins = {var: frozenset({var}) for var in (*graph.step.inputs, *makers_of(graph.outer))}
    in_loops = LoopReads(set(), {}, set())
    for member in graph.stage_work:
        _walk(member.eqns, origins, indices, in_loops)
    of_scans = LoopReads(set(), {}, set())
    for eqn in graph.outer:
        if eqn.primitive is scan_p:
            for body, passed in _bodies(eqn):
                known = {var: frozenset({atom}) for var, atom in passed if isinstance(atom, Var)}
                _walk(body.eqns, known, set(filter(is_index, body.invars[Scan.of(eqn).xs])), of_scans)
    return in_loops._replace(dimensions={**of_scans.dimensions, **in_loops.dimensions})


def _walk(eqns: Iterable[JaxprEqn], origins: Origins, indices: set[Var], loop_reads: LoopReads) -> None:
    """``indices`` are the variables that are computed from the microbatch index."""
    origins, indices = dict(origins), set(indices)
    for eqn in eqns:
        read = [var for var in operands(eqn) if var in origins]
        by_index = not indices.isdisjoint(operands(eqn))
        if eqn.primitive is per_group_p or eqn.primitive.name == "shard_map":
            loop_reads.by_device.update(*(origins[var] for var in read))
        elif bodies := list(_bodies(eqn)):
            for body, passed in bodies:
                _walk(
                    body.eqns,
                    {var: origins[atom] for var, atom in passed if is_among(atom, origins)},
                    {var for var, atom in passed if is_among(atom, indices)},
                    loop_reads,
                )
        elif by_index and not is_elementwise(eqn):
            largest = max(map(size, eqn.outvars), default=0)
            loop_reads.by_index.update(*(origins[var] for var in read if size(var) >= max(2, largest)))
            if eqn.primitive.name == "dynamic_slice" and eqn.invars[0] in read:
                _add_dimension(eqn, origins[eqn.invars[0]], indices, loop_reads)
        if by_index:
            indices.update(var for var in eqn.outvars if size(var) == 1)
        elif read and len(read) == len(operands(eqn)):
            origins |= dict.fromkeys(eqn.outvars, frozenset().union(*(origins[var] for var in read)))


def _add_dimension(eqn: JaxprEqn, origin: frozenset[Var], indices: set[Var], loop_reads: LoopReads) -> None:
    """Adds the dimension at whose index a ``dynamic_slice`` takes a microbatch of the value that it is of."""
    sizes = eqn.params["slice_sizes"]
    starts = [i for i, start in enumerate(eqn.invars[1:]) if is_among(start, indices)]
    of_value = [var for var in origin if aval_of(var).shape == aval_of(eqn.invars[0]).shape]
    if len(origin) == len(of_value) == len(starts) == 1 and sizes[starts[0]] == 1:
        loop_reads.dimensions[of_value[0]] = starts[0]


def _bodies(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, list[tuple[Var, Atom]]]]:
    """The bodies of an equation, with the operands that it passes to their variables.

    What a loop carries is left out: it is another value in each iteration.
    """
    if is_remat(eqn):
        yield eqn.params["jaxpr"], list(zip(eqn.params["jaxpr"].invars, eqn.invars, strict=True))
    elif eqn.primitive is scan_p:
        scan = Scan.of(eqn)
        yield scan.body, [*scan.operands(scan.consts).items(), *scan.operands(scan.xs).items()]
    elif eqn.primitive.name == "while":
        start = 0
        for name in ("cond", "body"):
            inner, constants = eqn.params[f"{name}_jaxpr"].jaxpr, eqn.params[f"{name}_nconsts"]
            stop = start + constants
            yield inner, list(zip(inner.invars[:constants], eqn.invars[start:stop], strict=True))
            start = stop
    elif eqn.primitive.name == "cond":
        for branch in eqn.params["branches"]:
            yield branch.jaxpr, list(zip(branch.jaxpr.invars, eqn.invars[1:], strict=True))

"""Sequence parallelism: between tensor-parallel regions, values are sharded along the regions' axis, too.

An equation is in a region if a value that it reads or makes is sharded along the axis, as weights are. Values
between regions with the dimension of the tokens, such as residuals and the outputs of norms, are sharded
along that dimension: where a region reads such a value it is gathered, and where a region computes one its
sum is scattered. So no device computes or keeps a whole value. A backward reads the sharded values that the
forward has kept, and gathers them again.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, PartitionSpec

from mpmd.compiler.graph import TaskGraph, stage_work
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    operands,
    subjaxprs,
    substitute,
    with_body,
    with_eqns,
)
from mpmd.compiler.jaxprs.sharded_dimensions import (
    ShardedDimensions,
    follow,
    follow_back,
    follow_inside,
    sharded,
)
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.compiler.request import SequenceParallel
from mpmd.ir.specs import axes_of
from mpmd.ir.stack import per_layer_range
from mpmd.sharding import to_sharding

Known = dict[Var, ShardedDimensions]

_TOKENS, _ROWS = "the tokens", "the rows"
"""Names of dimensions, which are followed as if they were axes of the mesh."""

_ROUNDS = 2
"""The times that facts go forwards and backwards: a term of a sum may have other readers, too."""


def with_residuals_sharded(
    graph: TaskGraph,
    parallel: SequenceParallel,
    outer: Mapping[Var, ShardedDimensions],
    whole: Mapping[Var, int],
    submeshes: Sequence[AbstractMesh],
) -> TaskGraph:
    """The graph with sharding constraints where its tasks enter and leave tensor-parallel regions.

    Args:
      parallel: the axis, and the dimensions of arguments that are sharded along it between regions.
      outer: the known shardings of outer values and accumulators.
      whole: for outer values, the dimension that counts microbatches.
      submeshes: the submeshes of all groups.
    """
    writer = _ConstraintWriter(parallel, submeshes)
    known = writer.known(graph, outer, whole)
    eqns = {}
    for member in graph.stage_work:
        known = writer.followed(member.eqns, known)
        eqns[member.work] = writer.rewritten(member.eqns, known)
    return dataclasses.replace(graph, stage_work=stage_work(eqns))


class _ConstraintWriter:
    def __init__(self, parallel: SequenceParallel, submeshes: Sequence[AbstractMesh]):
        self._parallel, self._submesh = parallel, submeshes[0]

        def most(axis: str) -> int:
            return math.lcm(*(submesh.shape.get(axis, 1) for submesh in submeshes))

        self._tokens = most(parallel.axis) * most(parallel.outer_axis)
        self._mesh = {**{axis: most(axis) for axis in submeshes[0].shape}, _TOKENS: self._tokens, _ROWS: 1}
        self._constraints: dict[Any, JaxprEqn] = {}

    def known(
        self, graph: TaskGraph, outer: Mapping[Var, ShardedDimensions], whole: Mapping[Var, int]
    ) -> Known:
        known = {var: self._along_axis(dimensions) for var, dimensions in outer.items()}
        step = graph.step
        for name, dims in ((_ROWS, self._parallel.rows), (_TOKENS, self._parallel.tokens)):
            of_leaves = [dims.get(i) for i in range(len(step.argument_leaves))]
            for argument, dim in zip(
                step.arguments, per_layer_range(step.argument_leaves, of_leaves), strict=True
            ):
                if dim is not None:
                    before = sharded(argument.var, known)
                    known[argument.var] = (*before[:dim], (*before[dim], name), *before[dim + 1 :])
        return follow(graph.outer, known, self._mesh, whole)

    def followed(self, eqns: Sequence[JaxprEqn], known: Known) -> Known:
        for _ in range(_ROUNDS):
            known = follow_back(eqns, follow(eqns, known, self._mesh))
        return known

    def rewritten(self, eqns: Sequence[JaxprEqn], known: Known) -> list[JaxprEqn]:
        gathered: dict[Var, Var] = {}
        written: list[JaxprEqn] = []
        for eqn in eqns:
            if subjaxprs(eqn):
                written.append(self._with_body(eqn, known))
            elif self._is_in_region(eqn, known):
                for var in dict.fromkeys(operands(eqn)):
                    if var not in gathered and self._is_residual(var, known):
                        gathered[var] = Var(var.aval)
                        written.append(self._constrained(var, gathered[var], known, is_sharded=False))
                written += self._scattered(substitute(eqn, gathered), known)
            elif any(self._is_residual(var, known) for var in operands(eqn)):
                written.append(eqn)
            else:
                written += self._scattered(eqn, known)
        return written

    def _scattered(self, eqn: JaxprEqn, known: Known) -> list[JaxprEqn]:
        results = {var: Var(var.aval) for var in eqn.outvars if self._is_residual(var, known)}
        outvars = [results.get(var, var) for var in eqn.outvars]
        constraints = [
            self._constrained(whole, var, known, is_sharded=True, like=var) for var, whole in results.items()
        ]
        return [eqn.replace(outvars=outvars), *constraints]

    def _with_body(self, eqn: JaxprEqn, known: Known) -> JaxprEqn:
        inside = follow_inside(eqn, [sharded(atom, known) for atom in eqn.invars], self._mesh)
        if inside is None:
            return eqn
        body, known_inside = inside
        return with_body(
            eqn, with_eqns(body, self.rewritten(body.eqns, self.followed(body.eqns, known_inside)))
        )

    def _along_axis(self, dimensions: ShardedDimensions) -> ShardedDimensions:
        return tuple(tuple(axis for axis in axes if axis == self._parallel.axis) for axes in dimensions)

    def _is_in_region(self, eqn: JaxprEqn, known: Known) -> bool:
        return any(
            self._parallel.axis in axes_of(sharded(atom, known)) for atom in (*eqn.invars, *eqn.outvars)
        )

    def _is_residual(self, atom: Atom, known: Known) -> bool:
        """Whether a value is sharded between regions: one with tokens and other elements for each."""
        dimensions = sharded(atom, known)
        if self._parallel.axis in axes_of(dimensions) or (_TOKENS,) not in dimensions:
            return False
        shape = aval_of(atom).shape
        return shape[dimensions.index((_TOKENS,))] % self._tokens == 0 and any(
            size > 1 and not axes for size, axes in zip(shape, dimensions, strict=True)
        )

    def _constrained(
        self, var: Var, result: Var, known: Known, is_sharded: bool, like: Var | None = None
    ) -> JaxprEqn:
        """The equation that makes ``result`` of a value: sharded along the axis, or whole along it."""
        dim = sharded(like or var, known).index((_TOKENS,))
        shape = aval_of(var).shape
        key = shape, aval_of(var).dtype, dim, is_sharded
        if key not in self._constraints:
            axes = [axis for axis in (self._parallel.outer_axis,) if axis in self._mesh]
            axes += [self._parallel.axis] * is_sharded
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape)
            entries[dim] = tuple(axes) or None
            sharding = to_sharding(entries, self._submesh)
            constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
            (self._constraints[key],), _ = traced_eqns(lambda x: [constrain(x)], [var])
        return self._constraints[key].replace(invars=[var], outvars=[result])

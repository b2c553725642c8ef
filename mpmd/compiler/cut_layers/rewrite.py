"""Rewrites a step with an equation for each layer range where values are in layer ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.concat_and_slice import ConcatOrSlice, concats_and_slices
from mpmd.compiler.cut_layers.dimension_graph import DimensionGraph, loop_operands
from mpmd.compiler.cut_layers.scans import add_scan
from mpmd.compiler.cut_layers.values import Values
from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import Atom, aval_of, closed, is_dropped, with_eqns
from mpmd.compiler.jaxprs.rules import exact_dimensions, part_params
from mpmd.ir.stack import Stack
from mpmd.language.reduce import treduce_p


class Rewriter:
    """Rewrites equations by rules. Each rule adds to ``Values`` the equations that compute the results of
    one equation."""

    def __init__(self, graph: DimensionGraph):
        self._graph = graph

    def add_all(self, values: Values, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            self.add(values, eqn)

    def add(self, values: Values, eqn: JaxprEqn) -> None:
        scan = self._graph.scans.get(id(eqn))
        if scan is not None and (sizes := self._graph.sizes(scan)):
            add_scan(values, scan, sizes)
        elif eqn.primitive is treduce_p:
            self._add_loop(values, eqn)
        elif not any(map(values.stack, eqn.invars)) and not any(map(values.planned, eqn.outvars)):
            values.emit(eqn, list(map(values.whole, eqn.invars)), eqn.outvars)
        elif eqn.primitive.name == "cond":
            self._add_cond(values, eqn)
        elif eqn.primitive.name == "optimization_barrier":
            self._add_barrier(values, eqn)
        else:
            self._add_equation(values, eqn)

    def _add_equation(self, values: Values, eqn: JaxprEqn) -> None:
        for dimension in exact_dimensions(eqn):
            if (stacks := _stacks_along(values, eqn, dimension)) is not None:
                _add_for_each_range(values, eqn, dimension, stacks)
                return
        for relation in concats_and_slices(eqn):
            if _is_cut(values, relation):
                _add_concat_or_slice(values, eqn, relation)
                return
        values.emit(eqn, [values.whole(atom, eqn) for atom in eqn.invars], eqn.outvars)

    def _add_barrier(self, values: Values, eqn: JaxprEqn) -> None:
        """Adds a barrier for each layer range, because a single barrier would place all layer ranges on
        one group."""
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            stack = values.planned(var)
            before = values.as_planned(atom, stack, eqn)
            after = (var,) if stack is None else values.define_ranges(var)
            for operand, result in zip(before, after, strict=True):
                values.emit(eqn, [operand], [result])

    def _add_cond(self, values: Values, eqn: JaxprEqn) -> None:
        stacks = [values.planned(var) for var in eqn.outvars]
        predicate, *others = eqn.invars
        first: Jaxpr = eqn.params["branches"][0].jaxpr
        read: list[Atom] = [values.whole(predicate, eqn)]
        for var, atom in zip(first.invars, others, strict=True):
            read += values.as_planned(atom, values.planned(var), eqn)
        branches = tuple(self._branch(values.within(), branch, stacks) for branch in eqn.params["branches"])
        values.emit(eqn, read, _results(values, eqn.outvars), branches=branches)

    def _branch(self, inner: Values, branch: ClosedJaxpr, stacks: Sequence[Stack | None]) -> ClosedJaxpr:
        invars = [new for var in branch.jaxpr.invars for new in inner.bind(var)]
        self.add_all(inner, branch.jaxpr.eqns)
        outvars = _as_planned(inner, branch.jaxpr.outvars, stacks)
        return closed(with_eqns(branch.jaxpr, inner.eqns, invars=invars, outvars=outvars))

    def _add_loop(self, values: Values, eqn: JaxprEqn) -> None:
        body: Jaxpr = eqn.params["body"]
        stacks = [values.planned(var) for var in eqn.outvars]
        closed_over, states, _ = loop_operands(eqn)
        inner = values.within()
        invars = [new for var in body.invars for new in inner.bind(var)]
        self.add_all(inner, body.eqns)
        new = with_eqns(body, inner.eqns, invars=invars, outvars=_as_planned(inner, body.outvars, stacks))
        read: list[Atom] = []
        for var, atom in zip(body.invars, closed_over, strict=False):
            read += values.as_planned(atom, values.planned(var), eqn)
        for stack, atom in zip(stacks, states, strict=True):
            read += values.as_planned(atom, stack, eqn)
        flags = {
            name: tuple(
                flag
                for flag, stack in zip(eqn.params[name], stacks, strict=True)
                for _ in (stack.sizes if stack else (1,))
            )
            for name in ("summed", "ordered", "carried")
        }
        values.emit(eqn.replace(effects=new.effects), read, _results(values, eqn.outvars), **flags, body=new)


def _as_planned(values: Values, atoms: Sequence[Atom], stacks: Sequence[Stack | None]) -> list[Atom]:
    pairs = zip(atoms, stacks, strict=True)
    return [new for atom, stack in pairs for new in values.as_planned(atom, stack)]


def _results(values: Values, outvars: Sequence[Var]) -> list[Var]:
    """Variables for the results of an equation; a result that is cut has one for each layer range."""
    return [new for var in outvars for new in values.bind(var)]


def _stacks_along(values: Values, eqn: JaxprEqn, dimension: CommonDimension) -> dict[int, Stack] | None:
    """By position, the layer ranges of operands along a dimension; ``None`` if it is not cut."""
    results = [_sizes_along(values.planned(eqn.outvars[i]), dim) for i, dim in dimension.outs.items()]
    operands = [_sizes_along(values.stack(eqn.invars[i]), dim) for i, dim in dimension.ins.items()]
    if not all(results) or not (results or (dimension.combine and any(operands))):
        return None
    stacks = {}
    for i, dim in dimension.ins.items():
        sizes = values.dimensions.sizes((eqn.invars[i], dim), aval_of(eqn.invars[i]).shape[dim])
        if sizes is None:  # it has too few elements to be cut there
            return None
        stacks[i] = Stack(dim, sizes)
    return stacks


def _sizes_along(stack: Stack | None, dim: int) -> tuple[int, ...] | None:
    return stack.sizes if stack is not None and stack.axis == dim else None


def _add_for_each_range(
    values: Values, eqn: JaxprEqn, dimension: CommonDimension, stacks: dict[int, Stack]
) -> None:
    """An equation for each layer range; if the results do not have the dimension, theirs are combined."""
    stacks_of_results = [values.planned(eqn.outvars[i]) for i in dimension.outs]
    first = stacks_of_results[0] if stacks_of_results else None
    sizes = first.sizes if first else ()
    number = len(sizes) or len(next(iter(stacks.values())).sizes)
    columns = [
        values.ranges(atom, stacks[i], eqn) if i in stacks else (values.whole(atom, eqn),) * number
        for i, atom in enumerate(eqn.invars)
    ]
    results = [
        values.range_vars(var, Stack(dimension.outs[i], sizes))
        if i in dimension.outs
        else tuple(values.var_like(var) for _ in range(number))
        for i, var in enumerate(eqn.outvars)
    ]
    for p in range(number):
        params = part_params(eqn, dimension, sizes[p]) if sizes else {}
        values.emit(eqn, [column[p] for column in columns], [column[p] for column in results], **params)
    for i, var in enumerate(eqn.outvars):
        if i in dimension.outs:
            values.set_ranges(var, results[i])
        else:
            values.set_whole(var, _combined(values, eqn, dimension, results[i]))


def _combined(values: Values, eqn: JaxprEqn, dimension: CommonDimension, results: Sequence[Atom]) -> Atom:
    """The result of the layer ranges' results."""
    if dimension.outs:
        return results[0]
    combine = dimension.combine
    assert combine is not None, f"{eqn.primitive} has no way to combine parts"
    return values.trace(lambda *xs: [reduce(combine, xs)], results, eqn)[0]


def _is_cut(values: Values, relation: ConcatOrSlice) -> bool:
    """Whether the value that is put together, or taken apart, is in layer ranges along the dimension."""
    whole = relation.whole
    stack = values.stack(whole) if relation.takes_apart else values.planned(whole)
    return _sizes_along(stack, relation.dim) is not None


def _add_concat_or_slice(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    if relation.reverses:
        _reverse(values, eqn, relation)
    elif relation.takes_apart:
        _take_apart(values, eqn, relation)
    else:
        _put_together(values, eqn, relation)


def _reverse(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    """Emits each part of the result as the reverse of the part of the operand at the same distance from
    the opposite end."""
    (var,), dim = eqn.outvars, relation.dim
    stack, length = values.planned(var), aval_of(var).shape[dim]
    cut = stack if stack is not None and stack.axis == dim else Stack(dim, (length,))
    ranges = values.range_vars(var, cut)
    for part, s in zip(ranges, cut.slices, strict=True):
        piece = values.piece(relation.whole, dim, length - s.stop, length - s.start, eqn)
        values.emit(eqn, [piece], [part])
    if cut == stack:
        values.set_ranges(var, ranges)
    else:
        values.set_whole(var, ranges[0])


def _take_apart(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    """Emits each part of a result from the layer ranges of the operand in which the part lies."""
    dim = relation.dim
    for member in relation.members:
        var = member.atom
        if not isinstance(var, Var) or is_dropped(var):
            continue
        stack = values.planned(var)
        cut = (
            stack
            if stack is not None and stack.axis == dim and member.has_dim
            else Stack(dim, (member.size,))
        )
        pieces = [
            values.piece(relation.whole, dim, member.start + s.start, member.start + s.stop, eqn)
            for s in cut.slices
        ]
        if eqn.primitive.name == "slice":
            pieces = [_elsewhere_sliced(values, eqn, dim, piece) for piece in pieces]
        if not member.has_dim:
            pieces = values.trace(lambda x: [lax.squeeze(x, [dim])], pieces, eqn)
        if cut == stack:
            values.set_ranges(var, pieces)
        else:
            values.set_whole(var, pieces[0])


def _elsewhere_sliced(values: Values, eqn: JaxprEqn, dim: int, piece: Atom) -> Atom:
    """The piece as a slice along other dimensions leaves it."""
    shape = list(aval_of(eqn.outvars[0]).shape)
    shape[dim] = aval_of(piece).shape[dim]
    if shape == list(aval_of(piece).shape):
        return piece
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    starts[dim], limits[dim] = 0, shape[dim]
    var = values.var_like(eqn.outvars[0], shape)
    values.emit(eqn, [piece], [var], start_indices=tuple(starts), limit_indices=tuple(limits))
    return var


def _put_together(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    """Emits each part of the result from the ranges of the operands that lie within the part."""
    whole, dim = relation.whole, relation.dim
    assert isinstance(whole, Var)
    stack = values.planned(whole)
    assert stack is not None
    ranges: list[Atom] = []
    for var, part in zip(values.range_vars(whole, stack), stack.slices, strict=True):
        inside = [m for m in relation.members if m.start < part.stop and part.start < m.stop]
        pieces = [
            values.piece(m.atom, dim, max(part.start - m.start, 0), min(part.stop, m.stop) - m.start, eqn)
            if m.has_dim
            else values.whole(m.atom, eqn)
            for m in inside
        ]
        if eqn.primitive.name == "pad":
            ranges.append(_padded(values, eqn, dim, var, pieces, [m.start for m in inside], part))
        elif eqn.primitive.name == "concatenate" and len(pieces) == 1:
            ranges.append(pieces[0])
        else:
            values.emit(eqn, pieces, [var])
            ranges.append(var)
    values.set_ranges(whole, ranges)


def _padded(
    values: Values,
    eqn: JaxprEqn,
    dim: int,
    var: Var,
    pieces: Sequence[Atom],
    starts: Sequence[int],
    part: slice,
) -> Atom:
    """A part of a padded value: what of the operand is in it, if anything, with padding around it."""
    padding = values.whole(eqn.invars[1], eqn)
    shape = aval_of(var).shape
    if not pieces:
        return values.trace(lambda x: [jnp.broadcast_to(x, shape)], [padding], eqn)[0]
    config = list(eqn.params["padding_config"])
    low = max(starts[0] - part.start, 0)
    config[dim] = (low, part.stop - part.start - low - aval_of(pieces[0]).shape[dim], 0)
    if all(tuple(one) == (0, 0, 0) for one in config):
        return pieces[0]
    values.emit(eqn, [pieces[0], padding], [var], padding_config=tuple(config))
    return var

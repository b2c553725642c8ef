"""Rewrites a step with an equation for each layer range where values are in layer ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.concat_and_slice import ConcatOrSlice, concats_and_slices
from mpmd.compiler.cut_layers.values import Values
from mpmd.compiler.jaxprs.common_dimension import CommonDimension
from mpmd.compiler.jaxprs.equations import Atom, closed, is_dropped, shape_of, with_eqns
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.compiler.jaxprs.rules import exact_dimensions, part_params
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.stack import Stack
from mpmd.language.reduce import treduce_p


def add_all(values: Values, eqns: Iterable[JaxprEqn]) -> None:
    for eqn in eqns:
        if sizes := values.graph.sizes(eqn):
            add_scan(values, eqn, sizes)
        elif eqn.primitive is treduce_p:
            _add_loop(values, eqn)
        elif not any(map(values.stack, eqn.invars)) and not any(map(values.planned, eqn.outvars)):
            values.emit(eqn, list(map(values.whole, eqn.invars)), eqn.outvars)
        elif eqn.primitive.name == "cond":
            _add_cond(values, eqn)
        elif eqn.primitive.name == "optimization_barrier":
            _add_barrier(values, eqn)
        else:
            _add_equation(values, eqn)


def _add_equation(values: Values, eqn: JaxprEqn) -> None:
    for dimension in exact_dimensions(eqn):
        if (stacks := _stacks_along(values, eqn, dimension)) is not None:
            _add_for_each_range(values, eqn, dimension, stacks)
            return
    for relation in concats_and_slices(eqn):
        if _is_cut(values, relation):
            rule = _take_apart if relation.takes_apart else _put_together
            rule(values, eqn, relation)
            return
    values.emit(eqn, [values.whole(atom, eqn) for atom in eqn.invars], eqn.outvars)


def _add_barrier(values: Values, eqn: JaxprEqn) -> None:
    """Adds a barrier for each layer range, because a single barrier would place all layer ranges on one
    group."""
    for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
        before = values.as_planned(atom, values.planned(var), eqn)
        for operand, result in zip(before, values.bind(var), strict=True):
            values.emit(eqn, [operand], [result])


def _add_cond(values: Values, eqn: JaxprEqn) -> None:
    predicate, *others = eqn.invars
    stacks = list(map(values.planned, eqn.params["branches"][0].jaxpr.invars))
    read = [values.whole(predicate, eqn), *_as_planned(values, others, stacks, eqn)]
    branches = [_rewritten_body(values, branch.jaxpr, eqn) for branch in eqn.params["branches"]]
    values.emit(eqn, read, _results(values, eqn), branches=tuple(map(closed, branches)))


def _add_loop(values: Values, eqn: JaxprEqn) -> None:
    stacks = list(map(values.planned, eqn.outvars))
    new = _rewritten_body(values, eqn.params["body"], eqn)
    read = _as_planned(values, eqn.invars, [*map(values.planned, closed_over(eqn)), *stacks], eqn)
    flags = {
        name: tuple(
            flag
            for flag, stack in zip(eqn.params[name], stacks, strict=True)
            for _ in (stack.sizes if stack else (1,))
        )
        for name in ("summed", "ordered", "carried")
    }
    values.emit(eqn.replace(effects=new.effects), read, _results(values, eqn), **flags, body=new)


def _rewritten_body(values: Values, body: Jaxpr, eqn: JaxprEqn) -> Jaxpr:
    inner = values.within()
    invars = [new for var in body.invars for new in inner.bind(var)]
    add_all(inner, body.eqns)
    outvars = _as_planned(inner, body.outvars, list(map(values.planned, eqn.outvars)))
    return with_eqns(body, inner.eqns, invars=invars, outvars=outvars)


def _as_planned(
    values: Values, atoms: Sequence[Atom], stacks: Sequence[Stack | None], like: JaxprEqn | None = None
) -> list[Atom]:
    pairs = zip(atoms, stacks, strict=True)
    return [new for atom, stack in pairs for new in values.as_planned(atom, stack, like)]


def _results(values: Values, eqn: JaxprEqn) -> list[Var]:
    return [new for var in eqn.outvars for new in values.bind(var)]


def _stacks_along(values: Values, eqn: JaxprEqn, dimension: CommonDimension) -> dict[int, Stack] | None:
    """By position, the layer ranges of operands along a dimension; ``None`` if it is not cut."""
    results = [_sizes_along(values.planned(eqn.outvars[i]), dim) for i, dim in dimension.outs.items()]
    operands = [_sizes_along(values.stack(eqn.invars[i]), dim) for i, dim in dimension.ins.items()]
    if not all(results) or not (results or (dimension.combine and any(operands))):
        return None
    stacks = {}
    for i, dim in dimension.ins.items():
        sizes = values.graph.dimensions.sizes((eqn.invars[i], dim), shape_of(eqn.invars[i])[dim])
        if sizes is None:  # it has too few elements to be cut there
            return None
        stacks[i] = Stack(dim, sizes)
    return stacks


def _sizes_along(stack: Stack | None, dim: int) -> tuple[int, ...] | None:
    return stack.sizes if stack is not None and stack.axis == dim else None


def _add_for_each_range(
    values: Values, eqn: JaxprEqn, dimension: CommonDimension, stacks: dict[int, Stack]
) -> None:
    ranges_of = {i: values.ranges(eqn.invars[i], stack, eqn) for i, stack in stacks.items()}
    results_of = {
        i: values.range_vars(eqn.outvars[i], stack)
        for i in dimension.outs
        if (stack := values.planned(eqn.outvars[i]))
    }
    number = len(next(iter([*results_of.values(), *ranges_of.values()])))
    for i, var in enumerate(eqn.outvars):
        if i not in results_of:
            results_of[i] = tuple(values.var_like(var) for _ in range(number))
    for p in range(number):
        operands = [
            ranges_of[i][p] if i in ranges_of else values.whole(atom, eqn)
            for i, atom in enumerate(eqn.invars)
        ]
        params: Mapping[str, Any] = {}
        for i, dim in itertools.islice(dimension.outs.items(), 1):
            params = part_params(eqn, dimension, shape_of(results_of[i][p])[dim])
        values.emit(eqn, operands, [results_of[i][p] for i in range(len(eqn.outvars))], **params)
    for i, var in enumerate(eqn.outvars):
        if i in dimension.outs:
            values.define(var, results_of[i])
        else:
            values.define(var, [_combined(values, eqn, dimension, results_of[i])])


def _combined(values: Values, eqn: JaxprEqn, dimension: CommonDimension, results: Sequence[Atom]) -> Atom:
    if dimension.outs:
        return results[0]
    combine = dimension.combine
    assert combine is not None, f"{eqn.primitive} has no way to combine parts"
    return values.trace(lambda *xs: [reduce(combine, xs)], results, eqn)[0]


def _is_cut(values: Values, relation: ConcatOrSlice) -> bool:
    whole = relation.whole
    stack = values.stack(whole) if relation.takes_apart else values.planned(whole)
    return _sizes_along(stack, relation.dim) is not None


def _take_apart(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    dim, length = relation.dim, shape_of(relation.whole)[relation.dim]
    for var, first, last in relation.members:
        if not isinstance(var, Var) or is_dropped(var):
            continue
        stack = values.planned(var) if relation.have_dim else None
        ranges = stack.slices if stack is not None and stack.axis == dim else (slice(0, last - first),)
        pieces: list[Atom] = []
        for s in ranges:
            start, stop = first + s.start, first + s.stop
            if eqn.primitive.name == "rev":
                start, stop = length - stop, length - start
            pieces.append(_with_rest(values, eqn, dim, values.piece(relation.whole, dim, start, stop, eqn)))
        if not relation.have_dim:
            pieces = values.trace(lambda x: [lax.squeeze(x, [dim])], pieces, eqn)
        values.define(var, pieces)


def _with_rest(values: Values, eqn: JaxprEqn, dim: int, piece: Atom) -> Atom:
    """A piece of an equation's operand after the rest of the equation: a reversal, or slices along other
    dimensions than ``dim``."""
    shape = list(shape_of(eqn.outvars[0]))
    shape[dim] = shape_of(piece)[dim]
    params: dict[str, Any] = {}
    if eqn.primitive.name == "slice" and tuple(shape) != shape_of(piece):
        starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
        starts[dim], limits[dim] = 0, shape[dim]
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
    elif eqn.primitive.name != "rev":
        return piece
    var = values.var_like(eqn.outvars[0], shape)
    values.emit(eqn, [piece], [var], **params)
    return var


def _put_together(values: Values, eqn: JaxprEqn, relation: ConcatOrSlice) -> None:
    whole, dim = relation.whole, relation.dim
    stack = values.planned(whole)
    assert isinstance(whole, Var) and stack is not None
    ranges: list[Atom] = []
    for var, part in zip(values.range_vars(whole, stack), stack.slices, strict=True):
        pieces = [
            values.piece(m.atom, dim, max(part.start - m.start, 0), min(part.stop, m.stop) - m.start, eqn)
            if relation.have_dim
            else values.whole(m.atom, eqn)
            for m in relation.members
            if max(m.start, part.start) < min(m.stop, part.stop)
        ]
        if eqn.primitive.name == "pad":
            low = max(relation.members[0].start - part.start, 0)
            ranges.append(_padded(values, eqn, dim, var, pieces, low))
        elif eqn.primitive.name == "concatenate" and len(pieces) == 1:
            ranges.append(pieces[0])
        else:
            values.emit(eqn, pieces, [var])
            ranges.append(var)
    values.define(whole, ranges)


def _padded(values: Values, eqn: JaxprEqn, dim: int, var: Var, pieces: Sequence[Atom], low: int) -> Atom:
    """A layer range of a padded value: a piece of the operand, if any is in the range, with ``low`` elements
    of padding before it and padding behind it."""
    padding, shape = values.whole(eqn.invars[1], eqn), shape_of(var)
    if not pieces:
        return values.trace(lambda x: [jnp.broadcast_to(x, shape)], [padding], eqn)[0]
    config = list(eqn.params["padding_config"])
    config[dim] = (low, shape[dim] - low - shape_of(pieces[0])[dim], 0)
    if all(tuple(one) == (0, 0, 0) for one in config):
        return pieces[0]
    values.emit(eqn, [*pieces, padding], [var], padding_config=tuple(config))
    return var


def add_scan(values: Values, eqn: JaxprEqn, sizes: tuple[int, ...]) -> None:
    """Adds a scan for each layer range, in the order in which the original scan visits the layers.

    Args:
      sizes: the sizes of the layer ranges of the arrays that the scan reads.
    """
    scan, stack = Scan.of(eqn), Stack(0, sizes)
    fixed = [values.whole(atom, eqn) for atom in eqn.invars[scan.consts]]
    carry = [values.whole(atom, eqn) for atom in eqn.invars[scan.carry]]
    xs = [values.ranges(atom, stack, eqn) for atom in eqn.invars[scan.xs]]
    stacked_vars = [var for var, _ in scan.stacked]
    ys = [values.range_vars(var, stack) for var in stacked_vars]
    for p in range(len(sizes))[:: -1 if eqn.params["reverse"] else 1]:
        results = [values.var_like(var) for var in eqn.outvars[: len(carry)]]
        values.emit(
            eqn,
            [*fixed, *carry, *(ranges[p] for ranges in xs)],
            [*results, *(ranges[p] for ranges in ys)],
            length=sizes[p],
            unroll=min(eqn.params["unroll"], sizes[p]),
        )
        carry = [
            carry[i] if after is before else results[i] for i, (before, after) in enumerate(scan.carried)
        ]
    for var, atom in zip(eqn.outvars[: scan.num_carry], carry, strict=True):
        values.define(var, [atom])
    for var, ranges in zip(stacked_vars, ys, strict=True):
        is_planned = values.planned(var) == stack
        values.define(var, ranges if is_planned else [values.joined(ranges, 0, eqn)])

"""Finds plain attention: scores of sequences by sequences, which no kernel keeps out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.equations import Atom, shape_of
from mpmd.compiler.jaxprs.flat import Operation, Value
from mpmd.planner.profiling.classes import ClassedOperation


def on_scores(members: Iterable[ClassedOperation]) -> list[ClassedOperation]:
    """The operations that read or make values of the shape of scores, whose dimensions may be transposed.

    Scores are a batched product whose exponentials are summed up, for the softmax: the exponentials of a
    softplus are not. The product sums over the elements of a head, which are fewer than the rows and columns
    of scores.
    """
    members = [one for one in members if one.operation.kernel is None]
    eqns = [one.operation.eqn for one in members]
    scores = _sizes_in_softmax([one.operation for one in members])
    scores &= {_sizes(eqn.outvars[0]) for eqn in eqns if _may_make_scores(eqn)}
    values = [{*map(_sizes, (*eqn.invars, *eqn.outvars))} for eqn in eqns]
    return [one for one, of_eqn in zip(members, values, strict=True) if of_eqn & scores]


def _sizes_in_softmax(operations: Iterable[Operation]) -> set[tuple[int, ...]]:
    """``operations`` are in the order in which they run. Sums may be of casts, or of a masked selection."""
    exponentials: set[Value] = set()
    sizes = set()
    for operation in operations:
        name, reads_one = operation.eqn.primitive.name, not exponentials.isdisjoint(operation.reads)
        if name == "exp" or (reads_one and name in ("convert_element_type", "select_n")):
            exponentials.update(operation.makes)
        elif name == "reduce_sum" and reads_one:
            sizes.add(_sizes(operation.eqn.invars[0]))
    return sizes


def _sizes(atom: Atom) -> tuple[int, ...]:
    return tuple(sorted(shape_of(atom)))


def _may_make_scores(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    rows_and_columns = sorted(shape_of(eqn.outvars[0])[len(batch) :])[-2:]
    of_head = math.prod(shape_of(eqn.invars[0])[d] for d in summed)
    return bool(batch) and len(rows_and_columns) == 2 and of_head < rows_and_columns[0]

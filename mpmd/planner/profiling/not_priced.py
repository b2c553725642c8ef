"""Notes for the user on equations of a step that a plan can only guess the costs of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from jax.extend.core import JaxprEqn

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.compiler.jaxprs.kernels import kernel_of

_NOTES = {
    "while": "a while loop counts as one iteration",
    "pallas_call": "a pallas_call counts as its equations, which devices do not share: mpmd.cost says more",
    "ragged_dot_general": (
        "each row of a ragged product counts once, while CPUs compute it with each group; experts are not "
        "divided by an all-to-all (expert parallelism), which XLA does not make of such products"
    ),
}


def not_priced(graph: TaskGraph) -> tuple[str, ...]:
    """The notes on the equations of a step, without the kernels of which ``mpmd.cost`` knows the costs."""
    eqns = itertools.chain(graph.outer, *(member.eqns for member in graph.stage_work))
    names = {*_names(eqns)}
    return tuple(note for name, note in _NOTES.items() if name in names)


def _names(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    for eqn in eqns:
        if kernel_of(eqn) is not None:
            continue
        yield eqn.primitive.name
        for inner in subjaxprs(eqn):
            yield from _names(inner.eqns)

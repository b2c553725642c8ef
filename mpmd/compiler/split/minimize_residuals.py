"""Chooses what a stage's forward keeps for its backward: as little as its cheap equations allow.

Differentiation keeps every value that a backward reads. For one activation function these are its input, the
square of that, its ``tanh``, one plus and one minus the ``tanh``, although simple arithmetic derives all but
two values from two. Under ``jax.jit`` of the whole step this costs nothing, because XLA computes
cheap values where they are read. Between executables, each is memory that a pipeline holds for several
microbatches.

The values that are kept are a minimum cut between what only the forward can compute and what the backward
reads. Keeping a value costs its bytes; a value that arithmetic or a change of layout derives from kept values
costs nothing.

Source: Horace He and Shangdi Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion
Aware", MLSys 2023. Unlike there, only what costs less than the memory traffic that it saves is computed
again, so time is not weighed against memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
from jax.extend.core import JaxprEqn, Var
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from mpmd.compiler.jaxprs.choices import choices_in
from mpmd.compiler.jaxprs.cost import is_cheaper_than_memory
from mpmd.compiler.jaxprs.equations import free_variables, makers_of, needed_eqns, operands
from mpmd.compiler.split.duplicates import Duplicate
from mpmd.compiler.split.scanned_residuals import ForwardScans, Node, ScanRow
from mpmd.ir.plan import TaskType
from mpmd.keys import to_aval

_ARRAY_BYTES = 512
"""Bytes that an array costs beside its own: half as a forward's output, half as a backward's input."""

_UNLIMITED = 2**31 - 1
_MOST = 2**30
"""Flows are 32-bit integers; costs that are more than this together are rounded."""

Eqns = Sequence[JaxprEqn]


def minimize_residuals(
    eqns: Mapping[TaskType, Eqns],
    results: Set[Var],
    states: Set[Var],
    duplicates: Mapping[Var, Duplicate],
    handed_on: Set[Var],
) -> tuple[dict[TaskType, Eqns], Set[Var]]:
    """Moves cheap equations of forwards that only the stage's own backward reads to that backward.

    Args:
      eqns: the equations of each work, with duplicates, in the order of a microbatch.
      results: the variables that accumulators are updated to.
      states: the variables of accumulators before their update, which only the update may read.
      duplicates: the variables of equations that their readers compute for themselves.
      handed_on: the variables that a slice of a microbatch reads from earlier slices, such as keys. They are
        kept for the backwards of the earlier slices, which run later.

    Returns: the work in the same order, without equations that nothing reads any more; and the variables that
      forwards and backwards now both define.
    """
    minimized = dict(eqns)
    recomputed: set[Var] = set()
    computed = {var for of_work in eqns.values() for eqn in of_work for var in eqn.outvars}
    read = {work: set(free_variables(of_work)) for work, of_work in eqns.items()}
    for work in eqns:
        backward = TaskType("bwd", work.stage)
        if work.kind == "fwd" and backward in eqns:
            forward = eqns[work]
            elsewhere = set().union(*(read[other] for other in eqns if other not in (work, backward)))
            scans = ForwardScans(forward, eqns[backward], elsewhere | results)
            residuals = _Residuals(
                forward, eqns[backward], computed | states, elsewhere, duplicates, handed_on, scans
            )
            kept, again = residuals.chosen()
            forward, reading = scans.keeping(forward, eqns[backward], kept)
            minimized[work] = forward
            minimized[backward] = _with_recomputed(forward, again, reading)
            recomputed.update(again)
    return _without_dead(minimized, results), recomputed


def _with_recomputed(forward: Eqns, again: Set[Var], backward: Eqns) -> Eqns:
    """Returns the backward after the equations of the forward that it repeats, in the forward's order."""
    of_forward = makers_of(forward).keys()
    of_backward = again | makers_of(backward).keys()
    shared = [eqn for eqn in forward if not of_backward.isdisjoint(eqn.outvars)]
    return [*shared, *(eqn for eqn in backward if of_forward.isdisjoint(eqn.outvars))]


def _without_dead(eqns: dict[TaskType, Eqns], results: Set[Var]) -> dict[TaskType, Eqns]:
    alive: dict[TaskType, Eqns] = {}
    read_later = set(results)
    for work in reversed(eqns):
        alive[work] = needed_eqns(eqns[work], read_later)
        read_later.update(free_variables(alive[work]))
    return {work: alive[work] for work in eqns}


class _Residuals:
    """Chooses the residuals of a stage, which its backward reads from its forward.

    Args:
      unavailable: the variables that a backward does not have unless a forward keeps them. Parameters and
        microbatches, which a backward has as well, are not among these variables.
      elsewhere: the variables that other work reads. If the forward computes one, it is an output already.
    """

    def __init__(
        self,
        forward: Eqns,
        backward: Eqns,
        unavailable: Set[Var],
        elsewhere: Set[Var],
        duplicates: Mapping[Var, Duplicate],
        handed_on: Set[Var],
        scans: ForwardScans,
    ):
        self._handed_on = handed_on
        self._unavailable = unavailable
        self._elsewhere = elsewhere
        self._duplicates = duplicates
        self._maker = makers_of(forward)
        self._choices = choices_in([*forward, *backward])
        self._scans = scans
        self._read: list[Node] = [
            scans.rows.get(var, var)
            for var in free_variables(backward)
            if var in self._maker or var in unavailable
        ]

    def chosen(self) -> tuple[set[Node], set[Var]]:
        """Returns the residuals to keep, and the variables that the backward recomputes from them."""
        derivations = self._derivations()
        costs = {node: self._cost(node) for node in derivations}
        kept = _minimum_cut(derivations, self._read, costs)
        again: set[Node] = set()
        stack = [node for node in self._read if node not in kept]
        while stack:
            node = stack.pop()
            if node not in again:
                again.add(node)
                stack.extend(self._sources(node) - kept)
        return kept, {node for node in again if isinstance(node, Var)}

    def _derivations(self) -> dict[Node, set[Node] | None]:
        """Maps each value that the backward needs to its operands; ``None`` if the forward has to keep it."""
        derivations: dict[Node, set[Node] | None] = {}
        stack = list(self._read)
        while stack:
            node = stack.pop()
            if node not in derivations:
                sources = derivations[node] = self._sources(node) if self._is_cheap(node) else None
                stack.extend(sources or ())
        return derivations

    def _is_cheap(self, node: Node) -> bool:
        if isinstance(node, ScanRow):
            return self._scans.is_cheap(node)
        eqn = self._maker.get(node)
        if eqn is None or node in self._choices:
            return False
        if eqn.primitive.name == "concatenate" and not self._handed_on.isdisjoint(operands(eqn)):
            return True  # each slice would keep the keys of all slices before it once more
        duplicate = self._duplicates.get(node)
        return is_cheaper_than_memory(eqn) if duplicate is None else not duplicate.once_per_stage

    def _cost(self, node: Node) -> int:
        if isinstance(node, ScanRow):
            return self._scans.nbytes(node) + _ARRAY_BYTES
        if node in self._handed_on:
            return _ARRAY_BYTES // 2
        is_output_anyway = node in self._maker and node in self._elsewhere
        return to_aval(node).nbytes + (_ARRAY_BYTES // 2 if is_output_anyway else _ARRAY_BYTES)

    def _sources(self, node: Node) -> set[Node]:
        read = self._scans.sources(node) if isinstance(node, ScanRow) else operands(self._maker[node])
        return {
            one for one in read if isinstance(one, ScanRow) or one in self._maker or one in self._unavailable
        }


def _minimum_cut(
    derivations: Mapping[Node, set[Node] | None], targets: Sequence[Node], costs: Mapping[Node, int]
) -> set[Node]:
    """Returns the cheapest set of values from which all ``targets`` can be derived.

    Of several cheapest sets, it is the set nearest to the targets, which leaves the least to recompute.

    Args:
      derivations: for each value the operands from which it can be recomputed, ``None`` if it has to be kept.
      costs: for each value, the bytes that keeping it costs.
    """
    source, sink = 0, 1
    enter = {var: 2 + 2 * i for i, var in enumerate(derivations)}
    leave = {var: enter[var] + 1 for var in derivations}
    unit = 1 + sum(costs.values()) // _MOST
    arcs: list[tuple[int, int, int]] = []
    for var, sources in derivations.items():
        # A variable is two nodes, with an arc between them that is cut when it is kept.
        arcs.append((enter[var], leave[var], costs[var] // unit))
        if sources is None:
            arcs.append((source, enter[var], _UNLIMITED))
        else:
            arcs.extend((leave[operand], enter[var], _UNLIMITED) for operand in sources)
    # Two stacks may have the same rows; the capacities of two equal arcs would be added, beyond 32 bits.
    arcs.extend((leave[var], sink, _UNLIMITED) for var in dict.fromkeys(targets))
    tails, heads, capacities = np.array(arcs, np.int32).reshape(-1, 3).T
    size = 2 + 2 * len(derivations)
    network = csr_array((capacities, (tails, heads)), shape=(size, size))
    spare = network - maximum_flow(network, source, sink).flow
    spare.eliminate_zeros()
    beyond = set(breadth_first_order(spare.T.tocsr(), sink, return_predecessors=False).tolist())
    return {var for var in derivations if leave[var] in beyond and enter[var] not in beyond}

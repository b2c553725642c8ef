"""Rewrites sums over the examples of a microbatch so that each shard keeps a partial sum.

A weight's gradient in a microbatch is a sum over examples: a contraction, a ``reduce_sum`` or a
``scatter-add`` over a dimension that is sharded along a mesh axis. XLA ends each sum with an all-reduce, in
every microbatch. Here such an equation becomes one with a new leading dimension, as large as the axis and
sharded along it, in which no value crosses devices. An operation that is linear in the sum, such as a
transposition, a factor, or the addition to an accumulator, is applied to the partial sums. So the accumulator
holds partial sums, and one sum over them follows the loop.

In the equations of a task, or of a body in them:

1. ``_candidates``: backwards from the values that are wanted as partial sums, through linear equations whose
   result no other equation reads, to the values that should be partial.
2. ``_Walk``: forwards, each candidate that is a sum over a sharded dimension is cut (``sums.py``), and each
   candidate that is linear in partial sums is computed from them (``linear.py``). A whole operand added to
   partial sums counts as partial sums, too: the operand and zeros.
3. The carry of a scan or of the microbatch loop is partial when its new value turns out to be. Then the
   equations are walked once more, with a partial old value, too.

Bodies of scans and of rematerialized functions are rewritten by the same steps, and stay bodies. A value that
no rule makes partial stays whole, which costs time; so does a wrong guess of how a dimension is sharded.
Neither changes the result.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import remat_p, scan_p

from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    entry_of,
    is_dropped,
    make_jaxpr,
    makers_of,
    needed_eqns,
    operands,
    variables,
    with_body,
)
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.sharded_dimensions import (
    Axes,
    ShardedDimensions,
    follow_inside,
    sharded,
)
from mpmd.compiler.shard.linear import constrained_axes, is_sharding_constraint, is_zero, linear_positions
from mpmd.compiler.shard.make_partial_sums import (
    PartialSum,
    PartialSumMaker,
    as_function,
)
from mpmd.compiler.shard.sums import cut_sum

Allowed = Mapping[Var, frozenset[str]]
"""For each value that may be held as partial sums, the mesh axes along which it may."""


@dataclasses.dataclass(frozen=True)
class RewrittenEqns:
    """Equations that make partial sums of some values, and these partial sums.

    ``partial`` has the partial sums of the targets, ``carry`` the partial sums of old carried values.
    """

    eqns: tuple[JaxprEqn, ...]
    partial: Mapping[Var, PartialSum]
    carry: Mapping[Var, PartialSum]


def as_partial_sums(
    eqns: Sequence[JaxprEqn],
    dimensions: Mapping[Var, ShardedDimensions],
    targets: Allowed,
    carry: Mapping[Var, Var],
    read: Iterable[Atom],
    maker: PartialSumMaker,
) -> RewrittenEqns:
    """Rewrites equations to compute as many of the ``targets`` as possible as partial sums.

    Args:
      dimensions: the known shardings of values.
      targets: for each value that may be partial, the mesh axes along which it may be.
      carry: for old carried values, the new ones, which are targets. A carried value is partial both before
        and after the equations, or neither.
      read: the values that are read after the equations, once for each reader.
    """
    uses = collections.Counter(atom for eqn in eqns for atom in operands(eqn))
    uses.update(variables(read))
    candidates = _candidates(eqns, targets, uses)
    read_whole = {new for old, new in carry.items() if old not in candidates}
    candidates = _candidates(eqns, _without(targets, read_whole), uses)
    first = _Walk(eqns, dimensions, candidates, maker)
    pairs = {old: new for old, new in carry.items() if new in first.partial}
    old_partial = {
        old: PartialSum(Var(aval_of(first.partial[new].var)), first.partial[new].axes)
        for old, new in pairs.items()
    }
    second = _Walk(eqns, dimensions, candidates, maker, old_partial) if pairs else first
    if any(second.partial[new].axes != old_partial[old].axes for old, new in pairs.items()):
        return as_partial_sums(eqns, dimensions, _without(targets, set(carry.values())), {}, read, maker)
    partial = {var: second.partial[var] for var in targets if var in second.partial and var not in read_whole}
    return RewrittenEqns(tuple(second.eqns), partial, old_partial)


def _without(targets: Allowed, others: set[Var]) -> Allowed:
    return {var: axes for var, axes in targets.items() if var not in others}


def _candidates(eqns: Sequence[JaxprEqn], targets: Allowed, uses: Mapping[Var, int]) -> Allowed:
    """The values that are only read on the way to targets, by equations that are linear in them."""
    reads_left = dict(uses)
    axes_of: dict[Var, frozenset[str]] = {}  # of values that are read on the way, and maybe elsewhere
    candidates = {var: axes for var, axes in targets.items() if uses[var] == 1}
    for eqn in reversed(eqns):
        results = [var for var in eqn.outvars if not is_dropped(var)]
        if not results or any(var not in candidates for var in results):
            continue
        axes = frozenset.intersection(*(candidates[var] for var in results)) - constrained_axes(eqn)
        for position in {i for positions in linear_positions(eqn) for i in positions}:
            if isinstance(atom := eqn.invars[position], Var) and atom not in targets:
                reads_left[atom] -= 1
                axes_of[atom] = axes_of.get(atom, axes) & axes
                if not reads_left[atom]:
                    candidates[atom] = axes_of[atom]
    return candidates


class _Walk:
    """Adds to equations the equations of the candidates' partial sums.

    All whole values are still defined, so that any equation may read one; dead ones are removed later.

    Args:
      old: the values that come in as partial sums. The first new equations sum them up for whole readers.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        dimensions: Mapping[Var, ShardedDimensions],
        candidates: Allowed,
        maker: PartialSumMaker,
        old: Mapping[Var, PartialSum] | None = None,
    ):
        self._dimensions = dimensions
        self._maker = maker
        self._makers = makers_of(eqns)
        self.partial: dict[Var, PartialSum] = dict(old or {})
        self.eqns: list[JaxprEqn] = [
            self._maker.sum_up(partial, var) for var, partial in self.partial.items()
        ]
        for eqn in eqns:
            targets = {var: candidates[var] for var in eqn.outvars if var in candidates}
            if not targets:
                self.eqns.append(eqn)
            elif eqn.primitive in (remat_p, scan_p):
                self._add_body(eqn, targets)
            else:
                self.eqns.append(eqn)
                self._add_partial_sum(eqn, frozenset.intersection(*targets.values()))

    def _add_partial_sum(self, eqn: JaxprEqn, allowed: frozenset[str]) -> None:
        for positions in linear_positions(eqn):
            if operand_sums := [p for i in positions if (p := entry_of(eqn.invars[i], self.partial))]:
                self._add_linear(eqn, positions, operand_sums[0].axes)
                return
        sharding = [sharded(atom, self._dimensions) for atom in eqn.invars]
        if cut := cut_sum(eqn, sharding, allowed, self._maker.mesh.shape, self._makers):
            self._add(eqn, cut.partial_sums, eqn.invars, cut.axes, cut.cut_points)

    def _add_linear(self, eqn: JaxprEqn, positions: Sequence[int], axes: Axes) -> None:
        if is_sharding_constraint(eqn):  # it asks for the whole value
            self.partial[eqn.outvars[0]] = self.partial[operands(eqn)[0]]
            return
        inputs: list[Atom] = list(eqn.invars)
        in_axes: list[int | None] = [None] * len(inputs)
        for i in positions:
            atom = inputs[i]
            if not is_zero(atom, self._makers):
                inputs[i] = self._as_partial_sum(atom, axes).var
                in_axes[i] = 0
        self._add(eqn, jax.vmap(as_function(eqn), in_axes), inputs, axes, tuple(in_axes))

    def _as_partial_sum(self, atom: Atom, axes: Axes) -> PartialSum:
        partial = entry_of(atom, self.partial)
        if partial is None or partial.axes != axes:
            eqns, partial = self._maker.as_first(atom, axes)
            self.eqns.extend(eqns)
        return partial

    def _add(
        self, eqn: JaxprEqn, fun: Callable, inputs: Sequence[Atom], axes: Axes, cut_points: Hashable
    ) -> None:
        key = eqn.primitive, tuple(eqn.params.items()), cut_points
        eqns, partial_sums = self._maker.make(fun, inputs, axes, key)
        self.eqns.extend(new.replace(source_info=eqn.source_info) for new in eqns)
        self.partial.update(zip(eqn.outvars, partial_sums, strict=True))

    def _add_body(self, eqn: JaxprEqn, targets: Allowed) -> None:
        sharding = [sharded(atom, self._dimensions) for atom in eqn.invars]
        inside = follow_inside(eqn, sharding, self._maker.mesh.shape)
        assert inside is not None, "only scans and rematerialized functions are rewritten inside"
        jaxpr, dimensions = inside
        scan = Scan.of(eqn) if eqn.primitive is scan_p else None
        pairs = zip(eqn.outvars, jaxpr.outvars, strict=True)
        wanted = {atom: targets[var] for var, atom in pairs if var in targets and isinstance(atom, Var)}
        carried = scan.carried if scan else ()
        carry = {old: new for old, new in carried if isinstance(new, Var) and new in wanted}
        rewritten = as_partial_sums(jaxpr.eqns, dimensions, wanted, carry, jaxpr.outvars, self._maker)
        partial = {
            i: sums for i, var in enumerate(jaxpr.outvars) if (sums := entry_of(var, rewritten.partial))
        }
        body = _with_partial_sums(jaxpr, rewritten, partial)
        invars, outvars = list(eqn.invars), list(eqn.outvars)
        for i, var in enumerate(jaxpr.invars):
            if var in rewritten.carry:
                invars[i] = self._as_partial_sum(invars[i], rewritten.carry[var].axes).var
        stacked = {i for i in partial if scan is not None and i >= scan.num_carry}
        for i, sums in partial.items():
            aval = aval_of(sums.var)
            leading = (scan.length,) if scan is not None and i in stacked else ()
            outvars[i] = Var(jax.core.ShapedArray((*leading, *aval.shape), aval.dtype))
        self.eqns.append(with_body(eqn, body).replace(invars=invars, outvars=outvars))
        for i, sums in partial.items():
            whole = eqn.outvars[i]
            self.partial[whole] = PartialSum(outvars[i], sums.axes)
            if i in stacked:
                self._add_first(whole, self.partial[whole])
            self.eqns.append(self._maker.sum_up(self.partial[whole], whole))

    def _add_first(self, whole: Var, stacked: PartialSum) -> None:
        """Adds the equation that puts partial sums in front of the iterations of a scan that stacks them."""
        eqns, (self.partial[whole],) = self._maker.make(
            lambda x: [jnp.moveaxis(x, 1, 0)], [stacked.var], stacked.axes, "stacked"
        )
        self.eqns.extend(eqns)


def _with_partial_sums(jaxpr: Jaxpr, rewritten: RewrittenEqns, results: Mapping[int, PartialSum]) -> Jaxpr:
    invars = [rewritten.carry[var].var if var in rewritten.carry else var for var in jaxpr.invars]
    outvars = [results[i].var if i in results else atom for i, atom in enumerate(jaxpr.outvars)]
    return make_jaxpr(invars, needed_eqns(rewritten.eqns, outvars), outvars)

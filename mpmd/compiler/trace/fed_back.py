"""Guesses which results of a step are arguments of the next one."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import Atom, aval_of, operands, size, variables
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.language.reduce import treduce_p


def find_fed_back(
    args: Sequence[Any], step: Jaxpr, out_shape: Any, donated: Sequence[bool]
) -> tuple[tuple[int, int], ...]:
    """Pairs (argument leaf, result leaf) that a training loop will connect.

    A part of the result is paired with the first argument that has the same structure, shapes and dtypes and
    is not paired yet. A single array is paired only with an argument that it depends on, and a scalar only
    with one of the same weak type, which distinguishes a step counter from a loss. An argument of which the
    step takes microbatches, and no more, is a batch: what the step makes of each row, such as the tokens that
    it predicts, is not the next batch, however alike they look. If the caller gives the argument up, it is
    state of each row, such as the state of a recurrent network. A wrong guess costs a transfer when the step
    is called; it never makes a number wrong.

    Args:
      args: the step's positional arguments, then its keyword arguments.
      step: a jaxpr of their leaves.
      out_shape: its results as a pytree.
      donated: for each leaf, whether the caller gives it up; empty if none is.
    """
    arguments, results = step.invars, step.outvars
    starts = [0]
    for argument in args:
        starts.append(starts[-1] + len(jax.tree.leaves(argument)))
    free: dict[Any, dict[int, None]] = collections.defaultdict(dict)
    live = live_eqns(step.eqns, step.outvars)
    batches = _find_batches(step, live) - set(itertools.compress(arguments, donated))
    read = set(variables(step.outvars)).union(*map(operands, live))
    for i, argument in enumerate(args):
        leaves = read.intersection(arguments[starts[i] : starts[i + 1]])
        if not leaves or not batches.issuperset(leaves):
            free[_structure_of(argument)][i] = None
    single = [arguments[start] for start, end in itertools.pairwise(starts) if end == start + 1]
    reached = _reached(single, live)

    def connected(argument: Var, result: Atom) -> bool:
        there, here = aval_of(argument), aval_of(result)
        if there.shape == () and there.weak_type != here.weak_type:
            return False
        return isinstance(result, Var) and bool(reached.get(result, 0) & reached[argument])

    pairs: list[tuple[int, int]] = []

    def match(part: Any, first_leaf: int) -> None:
        structure = _structure_of(part)
        leaves = range(len(structure[1]))
        for i in free.get(structure, ()) if leaves else ():
            alike = len(leaves) > 1 or connected(arguments[starts[i]], results[first_leaf])
            if alike:
                pairs.extend((starts[i] + k, first_leaf + k) for k in leaves)
                del free[structure][i]
                return
        for child in _children(part):
            match(child, first_leaf)
            first_leaf += len(jax.tree.leaves(child))

    match(out_shape, 0)
    return tuple(pairs)


def _structure_of(tree: Any) -> tuple[Any, tuple]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves)


def _children(tree: Any) -> list[Any]:
    children = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)[0]
    return [child for child in children if child is not tree]


def _reached(sources: Sequence[Var], eqns: Iterable[JaxprEqn]) -> Mapping[Var, int]:
    """For each variable the sources that it depends on, as the bits of a number."""
    reached = {var: 1 << i for i, var in enumerate(sources)}
    for eqn in eqns:
        bits = 0
        for var in operands(eqn):
            bits |= reached.get(var, 0)
        if bits:
            reached.update(dict.fromkeys(eqn.outvars, bits))
    return reached


_REARRANGED = frozenset(
    "broadcast_in_dim convert_element_type copy reshape sharding_constraint slice squeeze transpose".split()
)
_TAKEN = frozenset({"dynamic_slice", "gather"})


def _find_batches(step: Jaxpr, eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The arguments of a step that it reads by microbatches alone.

    Args:
      eqns: the step's equations that its results need.
    """
    read_otherwise = set(variables(step.outvars))
    taken: set[Var] = set()
    for eqn in reversed(eqns):
        taken_here: set[Var] = set()
        if eqn.primitive is treduce_p:
            taken_here = _taken_by(eqn)
        elif eqn.primitive.name in _REARRANGED and taken.difference(read_otherwise).issuperset(eqn.outvars):
            taken_here = set(operands(eqn))
        taken |= taken_here
        read_otherwise.update(var for var in operands(eqn) if var not in taken_here)
    return taken.difference(read_otherwise).intersection(step.invars)


def _taken_by(loop: JaxprEqn) -> set[Var]:
    """The values that a loop reads at the microbatch index alone."""
    body: Jaxpr = loop.params["body"]
    outer = closed_over(loop)
    whole = _read_whole(body, [body.invars[len(outer)]])
    read = {var for eqn in body.eqns for var in operands(eqn)} - whole
    taken = set(variables(atom for var, atom in outer.items() if var in read))
    return taken.difference(variables(loop.invars[len(outer) :]))


def _read_whole(jaxpr: Jaxpr, indices: Collection[Var]) -> set[Var]:
    """The values that equations read other than at one of the indices."""
    counted = set(indices)
    whole = set(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _TAKEN and not counted.isdisjoint(operands(eqn)[1:]):
            whole.update(operands(eqn)[1:])
        else:
            whole.update(operands(eqn))
        if not counted.isdisjoint(operands(eqn)) and all(size(var) == 1 for var in eqn.outvars):
            counted.update(eqn.outvars)
    return whole

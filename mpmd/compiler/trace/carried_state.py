"""Guesses which results of a step are arguments of the next one."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import Loop, TracedStep
from mpmd.compiler.jaxprs.equations import aval_of, free_variables, operands

Flow = tuple[Iterable[Var], Iterable[Var]]
"""What a part of the step reads, and what it makes."""


def find_carried_state(args: Sequence[Any], traced: TracedStep) -> tuple[tuple[int, int], ...]:
    """Pairs (argument leaf, result leaf) that a training loop will connect.

    A part of the result is paired with the first argument that has the same structure, shapes and dtypes and
    is not paired yet. A single array is paired only with an argument that it depends on, and a scalar only
    with one of the same weak type, which distinguishes a step counter from a loss. A wrong guess costs a
    transfer when the step is called; it never makes a number wrong.

    Args:
      args: the step's arguments, positional ones and those given by name.
    """
    arguments, results = traced.arguments, traced.results
    starts = [0]
    for argument in args:
        starts.append(starts[-1] + len(jax.tree.leaves(argument)))
    free: dict[Any, dict[int, None]] = collections.defaultdict(dict)
    for i, argument in enumerate(args):
        free[_structure_of(argument)][i] = None
    single = [arguments[start].var for start, end in itertools.pairwise(starts) if end == start + 1]
    in_loop = [_flow_of(traced.loop)] if traced.loop else []
    reached = _reached(single, [*_flows(traced.before), *in_loop, *_flows(traced.after)])

    def connected(argument: Var, result: Var) -> bool:
        there, here = aval_of(argument), aval_of(result)
        if there.shape == () and there.weak_type != here.weak_type:
            return False
        return bool(reached.get(result, 0) & reached[argument])

    pairs: list[tuple[int, int]] = []

    def match(part: Any, first_leaf: int) -> None:
        structure = _structure_of(part)
        leaves = range(len(structure[1]))
        for i in free.get(structure, ()) if leaves else ():
            alike = len(leaves) > 1 or connected(arguments[starts[i]].var, results[first_leaf].var)
            if alike:
                pairs.extend((starts[i] + k, first_leaf + k) for k in leaves)
                del free[structure][i]
                return
        for child in _children(part):
            match(child, first_leaf)
            first_leaf += len(jax.tree.leaves(child))

    match(traced.out_shape, 0)
    return tuple(pairs)


def _structure_of(tree: Any) -> tuple[Any, tuple]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves)


def _children(tree: Any) -> list[Any]:
    """The direct parts of a pytree node; none of a leaf."""
    children = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)[0]
    return [child for child in children if child is not tree]


def _flows(eqns: Iterable[JaxprEqn]) -> Iterator[Flow]:
    return ((operands(eqn), eqn.outvars) for eqn in eqns)


def _flow_of(loop: Loop) -> Flow:
    initial = (r.initial for r in loop.results if isinstance(r.initial, Var))
    values = (r.value for r in loop.results if isinstance(r.value, Var))
    return [*free_variables(loop.eqns), *values, *initial], [result.result for result in loop.results]


def _reached(sources: Sequence[Var], flows: Iterable[Flow]) -> Mapping[Var, int]:
    """For each variable the sources that it depends on, as the bits of a number."""
    reached = {var: 1 << i for i, var in enumerate(sources)}
    for reads, makes in flows:
        bits = 0
        for var in reads:
            bits |= reached.get(var, 0)
        if bits:
            reached.update(dict.fromkeys(makes, bits))
    return reached
